-- Delete the unneeded coalesce and ordering keys of one page, in the order of the primary key. Returns the last key of
-- the page, its number of keys, and the number of deleted keys. The page is as in _delete_dedupe_keys.
--
-- The head of a key is unneeded if no message of the key can become pending again, supersede another one or precede it:
--
-- - No message of the key is live, failed or cancelled. Only these can be delivered or redriven. Live messages have an
--   index by ordering key. One by coalesce key, which every enqueue would have to write, does not exist: the oldest live
--   messages are read instead. If more of them exist than are read, heads that are newer than those stay.
-- - The newest message is deleted. While it exists, `resend` and `cancel_by_key` need the head. Without a head `resend`
--   refuses an older message that was sent.
--
-- Both come from one snapshot, which contains the newest message of each head in it. The head is locked after that and
-- compared: an enqueue that committed in between has changed it. An open enqueue has it locked, so it is passed over.
CREATE FUNCTION pgoutbox._prune_keys(at_most bigint, after_scope text DEFAULT '', after_key text DEFAULT '')
RETURNS TABLE (last_scope text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $function$
WITH page AS MATERIALIZED (
    SELECT head.scope, head.key, head.newest_id
    FROM pgoutbox.key_head AS head
    WHERE (head.scope, head.key) > (after_scope, after_key)
    ORDER BY head.scope, head.key
    LIMIT at_most
), ended AS MATERIALIZED (
    SELECT p.scope, p.key, p.newest_id
    FROM page AS p
    WHERE (SELECT m.id FROM pgoutbox.message_done AS m WHERE m.id = p.newest_id LIMIT 1) IS NULL
        AND (SELECT m.id FROM pgoutbox._messages_of_key(p.scope, p.key) AS m(id) LIMIT 1) IS NULL
), oldest AS MATERIALIZED (
    SELECT m.id, m.topic, m.coalesce_key
    FROM pgoutbox.message_live AS m
    WHERE m.id <= (SELECT max(e.newest_id) FROM ended AS e WHERE e.scope NOT LIKE '/%')
    ORDER BY m.id
    LIMIT 10 * at_most
), locked AS MATERIALIZED (
    SELECT head.scope, head.key
    FROM ended AS e
    JOIN pgoutbox.key_head AS head ON head.scope = e.scope AND head.key = e.key
    WHERE head.newest_id = e.newest_id
        AND (
            e.scope LIKE '/%'
            OR e.newest_id <= coalesce((SELECT max(o.id) FROM oldest AS o HAVING count(*) = 10 * at_most), e.newest_id)
        )
        AND (e.scope, e.key) NOT IN (SELECT o.topic, o.coalesce_key FROM oldest AS o WHERE o.coalesce_key IS NOT NULL)
        AND (SELECT count(*) FROM ended) > 0 -- Producers wait for these locks: look up everything before the first.
    FOR UPDATE OF head SKIP LOCKED
), forgotten AS (
    DELETE FROM pgoutbox.key_head AS head
    USING locked AS l
    WHERE head.scope = l.scope AND head.key = l.key
    RETURNING head.newest_id
)
SELECT p.scope, p.key, (SELECT count(*) FROM page), (SELECT count(*) FROM forgotten)
FROM page AS p
ORDER BY p.scope DESC, p.key DESC
LIMIT 1
$function$;
