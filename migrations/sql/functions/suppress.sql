-- Stop the mail of a mailing list, or of every list, to an address. No handler of such a mail begins after the commit; mail of
-- topics without a list passes. A bounce and a complaint stop every list. Returns false if that is so already.
CREATE FUNCTION pgoutbox.suppress(address text, reason text, mailing_list text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM pgoutbox._raise_argument_error(
        pgoutbox._suppression_error(suppress.address, NULL, suppress.mailing_list, suppress.reason),
        in_function => 'suppress'
    );
    IF NOT pgoutbox._suppress(pgoutbox.address_digest(suppress.address), suppress.mailing_list, suppress.reason) THEN
        RETURN false;
    END IF;
    IF pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('suppress', details => jsonb_build_object(
            'mailing_list', suppress.mailing_list, 'reason', suppress.reason
        ));
    END IF;
    RETURN true;
END
$function$;
