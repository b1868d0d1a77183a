-- End the suppression of an address for a mailing list, or without a list the one for every list. Links to unsubscribe in
-- earlier mails of the list are refused from now on. Returns false if there is none.
CREATE FUNCTION pgoutbox.unsuppress(address text, mailing_list text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    found_digest constant text := pgoutbox.address_digest(unsuppress.address);
BEGIN
    PERFORM pgoutbox._raise_argument_error(
        pgoutbox._suppression_error(unsuppress.address, NULL, unsuppress.mailing_list, 'manual', NULL),
        in_function => 'unsuppress'
    );
    UPDATE pgoutbox.suppression AS s
    SET ended_at = clock_timestamp()
    WHERE s.digest = found_digest
        AND s.mailing_list = coalesce(unsuppress.mailing_list, '')
        AND s.ended_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('unsuppress', details => jsonb_build_object(
            'digest', found_digest, 'mailing_list', unsuppress.mailing_list
        ));
    END IF;
    RETURN true;
END
$function$;
