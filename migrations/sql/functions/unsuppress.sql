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
    found_list constant text := coalesce(unsuppress.mailing_list, '');
    is_in_force constant boolean := EXISTS (
        SELECT
        FROM pgoutbox.suppression AS s
        WHERE s.digest = found_digest AND s.mailing_list = found_list AND s.ended_at IS NULL
    );
BEGIN
    PERFORM pgoutbox._raise_argument_error(
        pgoutbox._suppression_error(unsuppress.address, NULL, unsuppress.mailing_list, 'manual'),
        in_function => 'unsuppress'
    );
    -- Without a suppression too: the time refuses links of earlier mails.
    INSERT INTO pgoutbox.suppression AS s (digest, mailing_list, reason, ended_at)
    VALUES (found_digest, found_list, 'manual', clock_timestamp())
    ON CONFLICT ON CONSTRAINT suppression_pkey DO UPDATE SET ended_at = excluded.ended_at;
    IF is_in_force AND pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('unsuppress', details => jsonb_build_object('mailing_list', unsuppress.mailing_list));
    END IF;
    RETURN is_in_force;
END
$function$;
