-- Messages that were due for the first time longer than `seconds` ago, and are still undelivered, by queue: whatever their
-- due time now. A message that was attempted counts from its first attempt.
SELECT
    u.queue,
    count(*) AS messages,
    extract(epoch FROM now() - min(u.due_at))::float8 AS oldest_seconds,
    (array_agg(u.id ORDER BY u.due_at, u.id))[1] AS oldest_id
FROM (
    (
        SELECT m.queue, m.id, m.available_at AS due_at
        FROM pgoutbox.message_view AS m
        WHERE m.state = 'pending' AND m.lane = 0
            AND m.available_at < now() - make_interval(secs => %(seconds)s::float8)
        LIMIT 10000
    )
    UNION ALL
    (
        SELECT m.queue, m.id, m.first_attempt_at
        FROM pgoutbox.message_view AS m
        WHERE m.state IN ('pending', 'sending') AND m.lane = 1
            AND m.first_attempt_at < now() - make_interval(secs => %(seconds)s::float8)
        LIMIT 10000
    )
) AS u
GROUP BY u.queue
ORDER BY oldest_seconds DESC
LIMIT 50
