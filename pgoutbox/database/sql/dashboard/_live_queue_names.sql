-- The names of up to `queues` queues that begin with `prefix`: those with live messages, limits or a pause. The query
-- follows.
WITH RECURSIVE named(queue, number) AS (
    SELECT '' COLLATE "C", 0
    UNION ALL
    -- This leaps along the indexes to the next name, because DISTINCT would read every message. It names no lane: of a
    -- queue without retries, a search for one would read all messages.
    SELECT next.queue, n.number + 1
    FROM named AS n
    CROSS JOIN LATERAL (
        SELECT min(found.queue)
        FROM (
            (
                SELECT m.queue FROM pgoutbox.message_view AS m
                WHERE m.ordering_key IS NULL AND m.state IN ('pending', 'sending')
                    AND m.queue > n.queue AND m.queue >= %(prefix)s::text
                ORDER BY m.queue LIMIT 1
            )
            UNION ALL
            (
                SELECT m.queue FROM pgoutbox.message_view AS m
                WHERE m.ordering_key IS NOT NULL AND m.state IN ('pending', 'sending')
                    AND m.queue > n.queue AND m.queue >= %(prefix)s::text
                ORDER BY m.queue LIMIT 1
            )
            UNION ALL
            (
                SELECT q.name FROM pgoutbox.queue_view AS q
                WHERE q.name > n.queue AND q.name >= %(prefix)s::text
                ORDER BY q.name LIMIT 1
            )
        ) AS found(queue)
    ) AS next(queue)
    WHERE starts_with(next.queue, %(prefix)s::text) AND n.number < %(queues)s::bigint
)
