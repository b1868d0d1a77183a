-- For each queue, the time since its oldest undelivered message fell due for the first time, whatever its due time now: a
-- message that was attempted counts from its first attempt. Messages that are scheduled do not count. Of the attempted
-- messages of a queue it reads those that are due first, up to 1,000: the queues share `rows`, of each lane. At most
-- `max_label_values` queues, those with the oldest messages, are reported separately; all others have the name `other`.
\ir ../dashboard/_live_queue_names.sql
, waiting AS (
    SELECT
        n.queue,
        greatest(
            0,
            extract(epoch FROM now() - (
                SELECT min(lane.due_at)
                FROM (
                    (
                        SELECT m.available_at AS due_at FROM pgoutbox.message_view AS m
                        WHERE m.queue = n.queue AND m.lane = 0 AND m.state = 'pending'
                            AND m.ordering_key IS NULL
                        ORDER BY m.available_at LIMIT 1
                    )
                    UNION ALL
                    (
                        SELECT m.first_attempt_at FROM pgoutbox.message_view AS m
                        WHERE m.queue = n.queue AND m.lane = 1 AND m.state IN ('pending', 'sending')
                            AND m.ordering_key IS NULL
                        ORDER BY m.available_at LIMIT n.rows
                    )
                    UNION ALL
                    (
                        SELECT CASE WHEN m.lane = 0 THEN m.available_at ELSE m.first_attempt_at END
                        FROM pgoutbox.message_view AS m
                        WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state IN ('pending', 'sending')
                            -- Always true: it permits the index message_live_ordered_due.
                            AND m.available_at > '-infinity'
                        ORDER BY m.available_at LIMIT n.rows
                    )
                ) AS lane
            ))::float8
        ) AS seconds
    FROM (
        SELECT named.queue, least(1000, greatest(20, %(rows)s::bigint / count(*) OVER ())) AS rows
        FROM named
        WHERE named.number > 0
    ) AS n
), ranked AS (
    SELECT w.queue, w.seconds, row_number() OVER (ORDER BY w.seconds DESC, w.queue) AS place
    FROM waiting AS w
)
SELECT
    CASE WHEN r.place <= %(max_label_values)s::bigint THEN r.queue ELSE %(other)s::text END AS queue,
    max(r.seconds) AS seconds
FROM ranked AS r
GROUP BY 1
ORDER BY 1
