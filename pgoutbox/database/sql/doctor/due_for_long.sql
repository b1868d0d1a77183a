-- Messages that have been due for longer than `seconds`, by queue, with the possible reasons.
WITH holds AS MATERIALIZED (
    SELECT b.key, held.hold
    FROM pgoutbox.breaker_view AS b
    CROSS JOIN LATERAL unnest(b.holds) AS held(hold)
), late AS (
    SELECT
        m.queue,
        m.topic,
        m.available_at,
        (
            SELECT min(h.key) FROM holds AS h WHERE h.hold = pgoutbox._hold_of(m.queue, m.topic, m.destination)
        ) AS breaker,
        m.ordering_key IS NOT NULL AND EXISTS (
            SELECT
            FROM pgoutbox.message_view AS f
            WHERE f.state = 'failed'
                AND f.queue = m.queue
                AND f.ordering_key = m.ordering_key
                AND f.halts_key
                AND f.id < m.id
        ) AS is_halted,
        m.ordering_key IS NOT NULL AND EXISTS (
            SELECT
            FROM pgoutbox.message_view AS earlier
            WHERE earlier.state IN ('pending', 'sending')
                AND earlier.queue = m.queue
                AND earlier.ordering_key = m.ordering_key
                AND earlier.id < m.id
        ) AS is_behind
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'pending' AND m.available_at < now() - make_interval(secs => %(seconds)s::float8)
    LIMIT 10000
), counted AS (
    SELECT
        l.queue,
        count(*) AS messages,
        extract(epoch FROM now() - min(l.available_at))::float8 AS oldest_seconds,
        coalesce(array_agg(DISTINCT l.topic) FILTER (WHERE NOT l.is_halted AND NOT l.is_behind), '{}') AS topics,
        count(*) FILTER (WHERE l.is_halted) AS halted,
        count(*) FILTER (WHERE NOT l.is_halted AND NOT l.is_behind) AS free,
        min(l.breaker) AS breaker,
        count(l.breaker) AS held
    FROM late AS l
    GROUP BY l.queue
)
SELECT
    c.queue,
    c.messages,
    c.oldest_seconds,
    c.topics,
    c.halted,
    c.free,
    c.breaker,
    c.held,
    q.is_paused,
    q.rate_count,
    q.rate_seconds,
    EXISTS (
        SELECT
        FROM pgoutbox.in_flight_view AS held
        WHERE held.queue = c.queue AND held.lease_expires_at > now()
    ) AS is_worked,
    q.tokens,
    q.max_in_flight,
    CASE WHEN q.max_in_flight IS NOT NULL THEN q.in_flight END AS in_flight
FROM counted AS c
LEFT JOIN pgoutbox.queue_view AS q ON q.name = c.queue
ORDER BY c.queue
LIMIT 50
