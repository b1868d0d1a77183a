-- The names of up to `queues` queues that begin with `prefix`: those with live messages, limits or a pause. The query
-- follows.
WITH RECURSIVE plain(queue, number) AS (
    SELECT '' COLLATE "C", 0
    UNION ALL
    -- This leaps along the index to the next name, because DISTINCT would read every message. It names no lane: of a queue
    -- without retries, a search for one would read all messages.
    SELECT next.queue, n.number + 1
    FROM plain AS n
    CROSS JOIN LATERAL (
        SELECT m.queue FROM pgoutbox.message_view AS m
        WHERE m.ordering_key IS NULL AND m.state IN ('pending', 'sending')
            AND m.queue > n.queue AND m.queue >= %(prefix)s::text
        ORDER BY m.queue LIMIT 1
    ) AS next
    WHERE starts_with(next.queue, %(prefix)s::text) AND n.number < %(queues)s::bigint
), ordered(queue, number) AS (
    -- In the same way along the index of ordering keys.
    SELECT '' COLLATE "C", 0
    UNION ALL
    SELECT next.queue, n.number + 1
    FROM ordered AS n
    CROSS JOIN LATERAL (
        SELECT m.queue FROM pgoutbox.message_view AS m
        WHERE m.ordering_key IS NOT NULL AND m.state IN ('pending', 'sending')
            AND m.queue > n.queue AND m.queue >= %(prefix)s::text
        ORDER BY m.queue LIMIT 1
    ) AS next
    WHERE starts_with(next.queue, %(prefix)s::text) AND n.number < %(queues)s::bigint
), named AS (
    (
        SELECT p.queue FROM plain AS p WHERE p.number > 0
        UNION
        SELECT o.queue FROM ordered AS o WHERE o.number > 0
        UNION
        SELECT q.name FROM pgoutbox.queue_view AS q WHERE starts_with(q.name, %(prefix)s::text)
    )
    ORDER BY 1 LIMIT %(queues)s::bigint
)
