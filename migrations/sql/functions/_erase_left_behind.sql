-- The caller has locked these keys in an earlier statement, so no message of them can be enqueued. The checks are those
-- of _prune_coalesce and _prune_ordering. Rows can outlive their message, for example the dedupe key of a message that
-- was deleted as it was sent. This statement deletes them only if it sees no such message: one may have just committed.
CREATE FUNCTION pgoutbox._erase_left_behind(
    tail_queues text[], tail_keys text[], head_topics text[], head_keys text[], missing_ids bigint[]
)
RETURNS SETOF bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    WITH live AS MATERIALIZED (
        -- No index has the coalesce keys of live messages.
        SELECT DISTINCT m.topic, m.coalesce_key
        FROM pgoutbox.message_live AS m
        JOIN unnest(head_topics, head_keys) AS k(topic, key) ON k.topic = m.topic AND k.key = m.coalesce_key
    ), head AS (
        DELETE FROM pgoutbox.coalesce_head AS h
        USING unnest(head_topics, head_keys) AS k(topic, key)
        WHERE h.topic = k.topic
            AND h.coalesce_key = k.key
            AND NOT EXISTS (SELECT FROM live AS l WHERE l.topic = k.topic AND l.coalesce_key = k.key)
            AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.id = h.newest_id LIMIT 1) IS NULL
            AND (
                SELECT m.id
                FROM pgoutbox.message_failed AS m
                WHERE m.topic = h.topic AND m.coalesce_key = h.coalesce_key
                LIMIT 1
            ) IS NULL
            AND (
                SELECT m.id
                FROM pgoutbox.message_done AS m
                WHERE m.topic = h.topic AND m.coalesce_key = h.coalesce_key AND m.state = 'cancelled'
                LIMIT 1
            ) IS NULL
        RETURNING h.newest_id
    ), tail AS (
        DELETE FROM pgoutbox.ordering AS t
        USING unnest(tail_queues, tail_keys) AS k(queue, key)
        WHERE t.queue = k.queue
            AND t.ordering_key = k.key
            AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.id = t.last_id LIMIT 1) IS NULL
            AND (
                SELECT m.id
                FROM pgoutbox.message_live AS m
                WHERE m.queue = t.queue AND m.ordering_key = t.ordering_key
                LIMIT 1
            ) IS NULL
            AND (
                SELECT m.id
                FROM pgoutbox.message_failed AS m
                WHERE m.queue = t.queue AND m.ordering_key = t.ordering_key
                LIMIT 1
            ) IS NULL
            AND (
                SELECT m.id
                FROM pgoutbox.message_done AS m
                WHERE m.queue = t.queue AND m.ordering_key = t.ordering_key AND m.state = 'cancelled'
                LIMIT 1
            ) IS NULL
        RETURNING t.last_id
    ), missing AS MATERIALIZED (
        SELECT a.id
        FROM unnest(missing_ids) AS a(id)
        WHERE (SELECT m.id FROM pgoutbox.message AS m WHERE m.id = a.id LIMIT 1) IS NULL
    ), deduped AS (
        DELETE FROM pgoutbox.dedupe AS d USING missing AS m WHERE d.message_id = m.id RETURNING d.message_id
    )
    SELECT h.newest_id FROM head AS h
    UNION ALL
    SELECT t.last_id FROM tail AS t
    UNION ALL
    SELECT d.message_id FROM deduped AS d;
END
$function$;

COMMENT ON FUNCTION pgoutbox._erase_left_behind IS
    'Delete those of the locked coalesce and ordering keys that no message needs, and the dedupe keys of '
    'missing messages. Returns the message of each deleted row.';
