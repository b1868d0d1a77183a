-- The waiting time of the oldest due message of each queue, 0 without one, and whether it waits for the end of a pause: for
-- queues with live messages, limits or a pause. While a topic is paused, it also looks for the first message of each lane
-- that belongs to no paused topic. Otherwise it reads one row of each lane, whatever the size of the backlog: this gauge
-- must not disappear when the backlog is largest. At most `max_label_values` queues, those that wait longest, are reported
-- separately; all others have the name `other`.
\ir ../dashboard/_live_queue_names.sql
, waiting AS (
    SELECT
        n.queue,
        one.is_paused,
        greatest(0, extract(epoch FROM now() - min(one.available_at))::float8) AS seconds
    FROM named AS n
    LEFT JOIN pgoutbox.queue_view AS q ON q.name = n.queue
    CROSS JOIN LATERAL (
        -- A queue without a due message has a row too.
        SELECT coalesce(q.is_paused, false) AS is_paused, NULL::timestamptz AS available_at
        UNION ALL
        SELECT
            coalesce(q.is_paused, false) OR lane.topic IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p),
            lane.available_at
        FROM (VALUES (false), (true)) AS kind(leaves_out_paused)
        CROSS JOIN LATERAL (
            SELECT first.*
            FROM (VALUES (0), (1), (2)) AS l(number)
            CROSS JOIN LATERAL (
                SELECT m.topic, m.available_at FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.lane = l.number AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                    AND NOT (
                        kind.leaves_out_paused AND m.topic IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p)
                    )
                ORDER BY m.available_at LIMIT 1
            ) AS first
            UNION ALL
            (
                SELECT m.topic, m.available_at FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
                    AND m.available_at <= now()
                    -- Always true: it permits the index message_live_ordered_due.
                    AND m.available_at > '-infinity'
                    AND NOT (
                        kind.leaves_out_paused AND m.topic IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p)
                    )
                ORDER BY m.available_at LIMIT 1
            )
        ) AS lane
        -- Without a pause, one read of each lane says all.
        WHERE NOT kind.leaves_out_paused OR EXISTS (SELECT FROM pgoutbox.topic_pause_view)
    ) AS one
    GROUP BY n.queue, one.is_paused
), ranked AS (
    SELECT w.queue, w.is_paused, w.seconds, row_number() OVER (ORDER BY w.seconds DESC, w.queue) AS place
    FROM waiting AS w
)
SELECT
    CASE WHEN r.place <= %(max_label_values)s::bigint THEN r.queue ELSE %(other)s::text END AS queue,
    r.is_paused::text AS paused,
    max(r.seconds) AS seconds
FROM ranked AS r
GROUP BY 1, 2
ORDER BY 1, 2
