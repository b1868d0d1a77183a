-- Messages that were due for the first time longer than `seconds` ago, and are still undelivered, by queue: whatever their
-- due time now. A message that was attempted counts from its first attempt. Of messages that were never attempted, those
-- of each queue that are due for longest are read.
\ir ../dashboard/_live_queue_names.sql
SELECT
    u.queue,
    count(*) AS messages,
    bool_or(u.is_capped) AS is_capped,
    extract(epoch FROM now() - min(u.due_at))::float8 AS oldest_seconds,
    (array_agg(u.id ORDER BY u.due_at, u.id))[1] AS oldest_id
FROM (
    SELECT l.queue, one.id, one.available_at AS due_at, count(*) OVER (PARTITION BY l.queue, one.part) >= l.rows AS is_capped
    FROM (
        SELECT
            named.queue,
            now() - make_interval(secs => %(seconds)s::float8) AS until_at,
            greatest(20, %(rows)s::bigint / count(*) OVER ()) AS rows
        FROM named
        WHERE named.number > 0
    ) AS l
    CROSS JOIN LATERAL (
        \ir _pending.sql
    ) AS one
    WHERE one.attempt_count = 0
    UNION ALL
    (
        SELECT m.queue, m.id, m.first_attempt_at, count(*) OVER () >= 10000
        FROM pgoutbox.message_view AS m
        WHERE m.state IN ('pending', 'sending') AND m.lane = 1
            AND m.first_attempt_at < now() - make_interval(secs => %(seconds)s::float8)
        LIMIT 10000
    )
) AS u
GROUP BY u.queue
ORDER BY oldest_seconds DESC
LIMIT 50
