-- The open breakers, newest first, with the pending messages that each has postponed last, due or not. Such a message has
-- had an attempt. They are counted among the next `cap` retries and the next `cap` messages with an ordering key.
WITH waiting AS MATERIALIZED (
    (
        SELECT m.breaker_key
        FROM pgoutbox.message_view AS m
        WHERE m.lane = 1 AND m.state = 'pending' AND m.ordering_key IS NULL
        ORDER BY m.queue, m.available_at
        LIMIT %(cap)s::bigint
    )
    UNION ALL
    (
        SELECT m.breaker_key
        FROM pgoutbox.message_view AS m
        WHERE m.ordering_key IS NOT NULL AND m.available_at > '-infinity' AND m.state = 'pending'
        ORDER BY m.queue, m.available_at
        LIMIT %(cap)s::bigint
    )
)
SELECT
    b.key,
    b.opened_at,
    b.retry_at,
    b.probe_until,
    b.cooldown_seconds,
    b.worker,
    b.last_error,
    (SELECT count(*) FROM waiting AS w WHERE w.breaker_key = b.key) AS waiting_count,
    (SELECT count(*) >= %(cap)s::bigint FROM waiting AS w) AS is_sample
FROM pgoutbox.breaker_view AS b
ORDER BY b.opened_at DESC, b.key
LIMIT %(limit)s::bigint
