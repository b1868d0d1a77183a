-- The due messages of other queues than the given ones, up to `cap` of each lane, and whether a worker serves the queue, or a
-- run of the last 25 hours did. A run reports what it has left.
\ir ../dashboard/_live_queue_names.sql
SELECT
    n.queue,
    due.messages,
    due.is_capped,
    EXISTS (
        SELECT
        FROM pgoutbox.worker_view AS w
        WHERE n.queue = ANY (w.queues) AND (w.ended_at IS NULL OR w.ended_at > now() - interval '25 hours')
    ) AS is_served
FROM named AS n
CROSS JOIN LATERAL (
    SELECT count(*) AS messages, coalesce(max(one.number) >= %(cap)s::bigint, false) AS is_capped
    FROM (
        SELECT row_number() OVER (PARTITION BY lane.number) AS number
        FROM (
            SELECT found.*
            FROM (VALUES (0), (1), (2)) AS l(number)
            CROSS JOIN LATERAL (
                SELECT l.number FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.lane = l.number AND m.state = 'pending' AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                ORDER BY m.available_at LIMIT %(cap)s::bigint
            ) AS found
            UNION ALL
            (
                SELECT 3 FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
                    AND m.available_at <= now()
                    -- Always true: it permits the index message_live_ordered_due.
                    AND m.available_at > '-infinity'
                ORDER BY m.available_at LIMIT %(cap)s::bigint
            )
        ) AS lane(number)
    ) AS one
) AS due
WHERE n.queue <> ALL (%(served)s::text[]) AND due.messages > 0
ORDER BY n.queue
