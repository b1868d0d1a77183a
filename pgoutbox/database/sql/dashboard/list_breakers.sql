-- The open breakers, newest first, with the pending messages behind each, due or not: those of its holds, and those that it
-- has postponed last. They are counted among the next `cap` messages of each lane, and of those with an ordering key.
WITH waiting AS MATERIALIZED (
    SELECT coalesce(
        (
            SELECT min(b.key)
            FROM pgoutbox.breaker_view AS b
            WHERE pgoutbox._hold_of(m.queue, m.topic, m.destination) = ANY (b.holds)
        ),
        m.breaker_key
    ) AS breaker_key
    FROM (
        (
            SELECT f.queue, f.topic, f.destination, f.breaker_key
            FROM pgoutbox.message_view AS f
            WHERE f.lane = 0 AND f.state = 'pending' AND f.ordering_key IS NULL
            ORDER BY f.queue, f.available_at
            LIMIT %(cap)s::bigint
        )
        UNION ALL
        (
            SELECT r.queue, r.topic, r.destination, r.breaker_key
            FROM pgoutbox.message_view AS r
            WHERE r.lane = 1 AND r.state = 'pending' AND r.ordering_key IS NULL
            ORDER BY r.queue, r.available_at
            LIMIT %(cap)s::bigint
        )
        UNION ALL
        (
            SELECT o.queue, o.topic, o.destination, o.breaker_key
            FROM pgoutbox.message_view AS o
            WHERE o.ordering_key IS NOT NULL AND o.available_at > '-infinity' AND o.state = 'pending'
            ORDER BY o.queue, o.available_at
            LIMIT %(cap)s::bigint
        )
    ) AS m
    -- Without an open breaker nothing is read.
    WHERE EXISTS (SELECT FROM pgoutbox.breaker_view)
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
