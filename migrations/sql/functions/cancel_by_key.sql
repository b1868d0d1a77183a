-- Cancel the newest message of a coalesce key, and the message of a dedupe key, like cancel. The newest message comes
-- first.
--
-- Its callers may not read the keys of other messages: they only get the result for the keys that they pass.
CREATE FUNCTION pgoutbox.cancel_by_key(
    topic text, coalesce_key text DEFAULT NULL, dedupe_key text DEFAULT NULL
)
RETURNS TABLE (id bigint, result text)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT target.id, pgoutbox.cancel(target.id)
FROM (
    SELECT head.newest_id
    FROM pgoutbox.key_head AS head
    WHERE head.scope = cancel_by_key.topic AND head.key = cancel_by_key.coalesce_key
    UNION ALL
    SELECT d.message_id
    FROM pgoutbox.dedupe AS d
    WHERE d.topic = cancel_by_key.topic AND d.dedupe_key = cancel_by_key.dedupe_key
) AS target(id)
ORDER BY target.id DESC
$function$;
