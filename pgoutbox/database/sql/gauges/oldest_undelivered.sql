-- For each queue, the time since its oldest undelivered message fell due for the first time, whatever its due time now.
-- Messages that are scheduled do not count. The queues share `rows`, of each lane, at most 1,000 each. At most
-- `max_label_values` queues, those with the oldest messages, are reported separately; all others have the name `other`.
\ir ../dashboard/_live_queue_names.sql
, waiting AS (
    SELECT l.queue, greatest(0, extract(epoch FROM now() - min(one.due_at))::float8) AS seconds
    FROM (
        SELECT
            named.queue,
            now() AS until_at,
            1 AS fresh_rows,
            least(1000, greatest(20, %(rows)s::bigint / count(*) OVER ())) AS rows
        FROM named
    ) AS l
    LEFT JOIN LATERAL (
        \ir ../doctor/_undelivered.sql
    ) AS one ON true
    GROUP BY l.queue
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
