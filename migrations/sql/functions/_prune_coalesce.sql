-- One page, as in _delete_dedupe_keys.
--
-- The head of a coalesce key is unneeded if no message of the key can become pending again or supersede another one:
--
-- - No message of the key is live, failed or cancelled. Only these can be delivered or redriven. No index of live
--   messages by key exists, which every enqueue would have to write: the oldest live messages are read instead. If more
--   of them exist than are read, heads that are newer than those stay.
-- - The newest message is deleted. While it exists, `resend` and `cancel_by_key` need the head. Without a head `resend`
--   refuses an older message that was sent.
--
-- Both come from one snapshot, which contains the newest message of each head in it. The head is locked after that and
-- compared: an enqueue that committed in between has changed it. An open enqueue has it locked, so it is passed over.
CREATE FUNCTION pgoutbox._prune_coalesce(at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT '')
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
WITH page AS MATERIALIZED (
    SELECT head.topic, head.coalesce_key, head.newest_id
    FROM pgoutbox.coalesce_head AS head
    WHERE (head.topic, head.coalesce_key) > (after_topic, after_key)
    ORDER BY head.topic, head.coalesce_key
    LIMIT at_most
), ended AS MATERIALIZED (
    SELECT p.topic, p.coalesce_key, p.newest_id
    FROM page AS p
    WHERE (SELECT m.id FROM pgoutbox.message_done AS m WHERE m.id = p.newest_id LIMIT 1) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_done AS m
            WHERE m.topic = p.topic AND m.coalesce_key = p.coalesce_key AND m.state = 'cancelled'
            LIMIT 1
        ) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_failed AS m
            WHERE m.topic = p.topic AND m.coalesce_key = p.coalesce_key
            LIMIT 1
        ) IS NULL
), oldest AS MATERIALIZED (
    SELECT m.id, m.topic, m.coalesce_key
    FROM pgoutbox.message_live AS m
    WHERE m.id <= (SELECT max(e.newest_id) FROM ended AS e)
    ORDER BY m.id
    LIMIT 10 * at_most
), locked AS MATERIALIZED (
    SELECT head.topic, head.coalesce_key
    FROM ended AS e
    JOIN pgoutbox.coalesce_head AS head ON head.topic = e.topic AND head.coalesce_key = e.coalesce_key
    WHERE head.newest_id = e.newest_id
        AND e.newest_id <= coalesce(
            (SELECT max(o.id) FROM oldest AS o HAVING count(*) = 10 * at_most), e.newest_id
        )
        AND (e.topic, e.coalesce_key) NOT IN (
            SELECT o.topic, o.coalesce_key FROM oldest AS o WHERE o.coalesce_key IS NOT NULL
        )
    FOR UPDATE OF head SKIP LOCKED
), forgotten AS (
    DELETE FROM pgoutbox.coalesce_head AS head
    USING locked AS l
    WHERE head.topic = l.topic AND head.coalesce_key = l.coalesce_key
    RETURNING head.newest_id
)
SELECT p.topic, p.coalesce_key, (SELECT count(*) FROM page), (SELECT count(*) FROM forgotten)
FROM page AS p
ORDER BY p.topic DESC, p.coalesce_key DESC
LIMIT 1
$function$;

COMMENT ON FUNCTION pgoutbox._prune_coalesce IS
    'Delete the unneeded coalesce keys of one page, in the order of the primary key. Returns the last key of the page,'
    ' its number of keys, and the number of deleted keys.';
