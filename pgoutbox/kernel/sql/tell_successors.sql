-- Tell workers about the due messages that had to wait for these messages, because they have the same coalesce or ordering
-- key. Returns their queues, and notifies other workers of those that this worker does not begin: it names its own queues
-- and topics only while it has room. It looks for the next message of an ordering key of its topics by itself.
-- It runs after the commit that ended the messages: a claim before it found them still live, and a successor that was
-- committed later notifies itself.
SELECT next.queue,
    CASE
        WHEN NOT next.is_own AND pg_notification_queue_usage() < 0.5 THEN pg_notify('pgoutbox', 'all ' || next.queue)
    END
FROM (
    SELECT DISTINCT successor.queue, successor.is_own
    FROM unnest(
        %(ids)s::bigint[], %(topics)s::text[], %(queues)s::text[], %(coalesce_keys)s::text[], %(ordering_keys)s::text[]
    ) AS done(id, topic, queue, coalesce_key, ordering_key)
    CROSS JOIN LATERAL (
        SELECT m.id, m.queue, m.state, m.available_at,
            m.queue = ANY (%(own_queues)s::text[])
                AND pgoutbox._handled_as(m.topic, m.payload_version) = ANY (%(own_topics)s::text[]) AS is_own
        FROM pgoutbox.message_live AS m
        -- With a join PostgreSQL may plan to read the whole primary key, because statistics may describe an empty table.
        WHERE m.id = ANY (ARRAY(
            SELECT head.newest_id
            FROM pgoutbox.key_head AS head
            WHERE head.scope = done.topic AND head.key = done.coalesce_key
        ))
        UNION ALL
        SELECT first.id, first.queue, first.state, first.available_at, false
        FROM (
            SELECT m.id, m.queue, m.topic, m.payload_version, m.state, m.available_at
            FROM pgoutbox.message_live AS m
            WHERE m.queue = done.queue AND m.ordering_key = done.ordering_key
            ORDER BY m.id
            LIMIT 1
        ) AS first
        WHERE pgoutbox._handled_as(first.topic, first.payload_version) <> ALL (%(own_topics)s::text[])
    ) AS successor
    WHERE successor.id <> done.id AND successor.state = 'pending' AND successor.available_at <= now()
) AS next
