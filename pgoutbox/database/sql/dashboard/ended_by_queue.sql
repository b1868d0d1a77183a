-- Messages that ended in the last `seconds` by queue, and the seconds in which they ended. They are found by the block
-- ranges of finished_at. Of more than `cap` messages only the first ones that are read count, with their own time.
WITH ended AS MATERIALIZED (
    SELECT m.queue, m.finished_at
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at > now() - make_interval(secs => %(seconds)s::float8)
    LIMIT %(cap)s::bigint
)
\ir _span.sql
SELECT e.queue, count(*) AS messages, (SELECT s.seconds FROM span AS s) AS seconds
FROM ended AS e
WHERE e.queue = ANY (%(queues)s::text[])
GROUP BY e.queue
