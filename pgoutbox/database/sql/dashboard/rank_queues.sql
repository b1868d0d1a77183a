-- The `limit` queues that need a look first, among up to `queues` names that begin with `prefix`; the number of these names,
-- and the time of their oldest due message. Queues with a message that is due for a minute come first, then those with the
-- most due messages. Up to `cap` due messages of each lane count.
\ir _live_queue_names.sql
SELECT ranked.queue, ranked.queue_count, ranked.oldest_due_at
FROM (
    SELECT
        n.queue,
        counted.due,
        coalesce(counted.oldest_at < now() - interval '1 minute', false) AS is_late,
        count(*) OVER () AS queue_count,
        min(counted.oldest_at) OVER () AS oldest_due_at
    FROM named AS n
    CROSS JOIN LATERAL (
        SELECT count(*) AS due, min(lane.available_at) AS oldest_at
        FROM (
            (
                SELECT m.available_at FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.lane = 0 AND m.state = 'pending' AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                ORDER BY m.available_at LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT m.available_at FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.lane = 1 AND m.state = 'pending' AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                ORDER BY m.available_at LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT m.available_at FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
                    AND m.available_at <= now()
                    -- Always true: it permits the index message_live_ordered_due.
                    AND m.available_at > '-infinity'
                ORDER BY m.available_at LIMIT %(cap)s::bigint
            )
        ) AS lane
    ) AS counted
    WHERE n.number > 0
) AS ranked
ORDER BY ranked.is_late DESC, ranked.due DESC, ranked.queue
LIMIT %(limit)s::bigint
