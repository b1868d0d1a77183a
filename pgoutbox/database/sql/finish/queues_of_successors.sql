-- The queues of due messages that had to wait for these messages, because they have the same coalesce or ordering key. The
-- worker wakes these queues. It runs this after the commit that ended the messages: a claim before it found them still
-- live.
-- This worker finds the next message of an ordering key itself. If another worker serves its topic, `is_foreign` is true.
SELECT DISTINCT next.queue, next.is_foreign
FROM unnest(
    %(ids)s::bigint[], %(topics)s::text[], %(queues)s::text[], %(coalesce_keys)s::text[], %(ordering_keys)s::text[]
) AS done(id, topic, queue, coalesce_key, ordering_key)
CROSS JOIN LATERAL (
    SELECT m.id, m.queue, m.state, m.available_at, false AS is_foreign
    FROM pgoutbox.message_live AS m
    -- With a join PostgreSQL may plan to read the whole primary key, because statistics may describe an empty table.
    WHERE m.id = ANY (ARRAY(
        SELECT head.newest_id
        FROM pgoutbox.key_head AS head
        WHERE head.scope = done.topic AND head.key = done.coalesce_key
    ))
    UNION ALL
    SELECT first.id, first.queue, first.state, first.available_at, true
    FROM (
        SELECT m.id, m.queue, m.topic, m.state, m.available_at
        FROM pgoutbox.message_live AS m
        WHERE m.queue = done.queue AND m.ordering_key = done.ordering_key
        ORDER BY m.id
        LIMIT 1
    ) AS first
    WHERE first.topic <> ALL (%(own_topics)s::text[])
) AS next
WHERE next.id <> done.id AND next.state = 'pending' AND next.available_at <= now()
