-- Give a dedupe key that has a row to the message of a draft, as _take_dedupe_keys does. Returns the message that has the
-- key, null if the new one got it. This look takes no lock, so that repetitions of a message do not wait for each other.
CREATE FUNCTION pgoutbox._take_used_dedupe_key(draft pgoutbox.draft, id bigint)
RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $function$
BEGIN
    IF (
        SELECT d.is_kept OR NOT pgoutbox._has_freed_key(d.message_id)
        FROM pgoutbox.dedupe AS d
        WHERE d.topic = draft.topic AND d.dedupe_key = draft.dedupe_key
        ORDER BY d.message_id DESC -- An old snapshot may see a deleted row too.
        LIMIT 1
    ) THEN
        RETURN pgoutbox._take_dedupe_key(draft, id);
    END IF;
    RETURN (pgoutbox._take_dedupe_keys(ARRAY[draft], ARRAY[id]))[1];
END
$function$;
