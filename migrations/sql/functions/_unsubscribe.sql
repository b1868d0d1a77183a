-- Suppress the address of a link to unsubscribe, for its mailing list. Returns false if the suppression of this address for
-- this list was ended after the link was made: then the person has subscribed again.
CREATE FUNCTION pgoutbox._unsubscribe(digest text, mailing_list text, issued_at timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '2s' -- A transaction that suppresses the same address may be open for long.
AS $function$
BEGIN
    PERFORM pgoutbox._suppress(
        _unsubscribe.digest, _unsubscribe.mailing_list, 'unsubscribe', asked_at => _unsubscribe.issued_at
    );
    RETURN EXISTS (
        SELECT
        FROM pgoutbox.suppression AS s
        WHERE s.digest = _unsubscribe.digest
            AND s.mailing_list = _unsubscribe.mailing_list
            AND s.ended_at IS NULL
    );
END
$function$;
