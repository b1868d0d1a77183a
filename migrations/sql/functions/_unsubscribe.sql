-- Suppress the address of a link to unsubscribe, for its mailing list. Returns false if the suppression of this address for
-- this list was ended after the link was made: then the person has subscribed again. Null: another database made the link.
CREATE FUNCTION pgoutbox._unsubscribe(digest text, mailing_list text, issued_at timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '2s' -- A transaction that suppresses the same address may be open for long.
AS $function$
BEGIN
    IF left(digest, 8) <> pgoutbox._list_mark() THEN
        RETURN NULL;
    END IF;
    PERFORM pgoutbox._suppress(digest, mailing_list, 'unsubscribe', asked_at => issued_at);
    -- A statement of its own sees what a click at the same time has committed.
    RETURN EXISTS (
        SELECT
        FROM pgoutbox.suppression AS s
        WHERE s.digest = _unsubscribe.digest AND s.mailing_list = _unsubscribe.mailing_list AND s.ended_at IS NULL
    );
END
$function$;
