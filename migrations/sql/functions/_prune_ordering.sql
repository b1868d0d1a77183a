-- One page, as in _delete_dedupe_keys.
--
-- The row of an ordering key makes an enqueue draw its id after the ids of the earlier messages. It is unneeded if none
-- of these is live, failed or cancelled: no message waits for a sent or skipped one. The row also stays while its last
-- message exists, so that a rarely used key keeps its row.
CREATE FUNCTION pgoutbox._prune_ordering(at_most bigint, after_queue text DEFAULT '', after_key text DEFAULT '')
RETURNS TABLE (last_queue text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
WITH page AS MATERIALIZED (
    SELECT tail.queue, tail.ordering_key, tail.last_id
    FROM pgoutbox.ordering AS tail
    WHERE (tail.queue, tail.ordering_key) > (after_queue, after_key)
    ORDER BY tail.queue, tail.ordering_key
    LIMIT at_most
), ended AS MATERIALIZED (
    SELECT p.queue, p.ordering_key, p.last_id
    FROM page AS p
    WHERE (SELECT m.id FROM pgoutbox.message_done AS m WHERE m.id = p.last_id LIMIT 1) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_done AS m
            WHERE m.queue = p.queue AND m.ordering_key = p.ordering_key AND m.state = 'cancelled'
            LIMIT 1
        ) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_failed AS m
            WHERE m.queue = p.queue AND m.ordering_key = p.ordering_key
            LIMIT 1
        ) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_live AS m
            WHERE m.queue = p.queue AND m.ordering_key = p.ordering_key
            LIMIT 1
        ) IS NULL
), locked AS MATERIALIZED (
    SELECT tail.queue, tail.ordering_key
    FROM ended AS e
    JOIN pgoutbox.ordering AS tail ON tail.queue = e.queue AND tail.ordering_key = e.ordering_key
    WHERE tail.last_id = e.last_id
        AND (SELECT count(*) FROM ended) > 0 -- Producers wait for these locks: look up everything before the first.
    FOR UPDATE OF tail SKIP LOCKED
), forgotten AS (
    DELETE FROM pgoutbox.ordering AS tail
    USING locked AS l
    WHERE tail.queue = l.queue AND tail.ordering_key = l.ordering_key
    RETURNING tail.last_id
)
SELECT p.queue, p.ordering_key, (SELECT count(*) FROM page), (SELECT count(*) FROM forgotten)
FROM page AS p
ORDER BY p.queue DESC, p.ordering_key DESC
LIMIT 1
$function$;

COMMENT ON FUNCTION pgoutbox._prune_ordering IS
    'Delete the unneeded ordering keys of one page, in the order of the primary key. Returns the last key of the page,'
    ' its number of keys, and the number of deleted keys.';
