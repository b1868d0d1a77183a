-- The names of up to `queues` queues: those with live messages, limits or a pause; or the given queue. The query follows.
WITH RECURSIVE named(queue, number) AS (
    SELECT coalesce(%(queue)s::text, '') COLLATE "C", 0
    UNION ALL
    -- This leaps along the index of each lane to the next name, because DISTINCT would read every message.
    SELECT next.queue, n.number + 1
    FROM named AS n
    CROSS JOIN LATERAL (
        SELECT min(found.queue)
        FROM (
            (
                SELECT m.queue FROM pgoutbox.message_view AS m
                WHERE m.lane = 0 AND m.state IN ('pending', 'sending') AND m.ordering_key IS NULL AND m.queue > n.queue
                ORDER BY m.queue LIMIT 1
            )
            UNION ALL
            (
                SELECT m.queue FROM pgoutbox.message_view AS m
                WHERE m.lane = 1 AND m.state IN ('pending', 'sending') AND m.ordering_key IS NULL AND m.queue > n.queue
                ORDER BY m.queue LIMIT 1
            )
            UNION ALL
            (
                SELECT m.queue FROM pgoutbox.message_view AS m
                WHERE m.ordering_key IS NOT NULL AND m.state IN ('pending', 'sending') AND m.queue > n.queue
                ORDER BY m.queue LIMIT 1
            )
            UNION ALL
            (SELECT q.name FROM pgoutbox.queue_view AS q WHERE q.name > n.queue ORDER BY q.name LIMIT 1)
        ) AS found(queue)
    ) AS next(queue)
    WHERE next.queue IS NOT NULL AND n.number < %(queues)s::bigint AND %(queue)s::text IS NULL
)
