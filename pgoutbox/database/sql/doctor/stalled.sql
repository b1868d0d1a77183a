-- Messages of the given queues that were postponed because their receiver answered none of the sends in flight, by receiver:
-- if their first attempt was longer than `seconds` ago. Each time they are due, they are postponed for some seconds again, so
-- they are never late. The queues share `rows`.
SELECT
    one.breaker_key AS key,
    min(one.queue) AS queue,
    count(*) AS messages,
    bool_or(one.is_capped) AS is_capped,
    extract(epoch FROM now() - min(one.first_attempt_at))::float8 AS oldest_seconds
FROM (
    SELECT l.queue, m.*, count(*) OVER (PARTITION BY l.queue, m.part) >= l.rows AS is_capped
    FROM (
        SELECT
            named.queue,
            least(%(rows)s::bigint / 10, greatest(2, %(rows)s::bigint / count(*) OVER ())) AS rows
        FROM unnest(%(names)s::text[]) AS named(queue)
    ) AS l
    CROSS JOIN LATERAL (
        -- Each of them has been attempted. Those with a fair key wait for another turn.
        SELECT lane.number AS part, found.*
        FROM (VALUES (1), (2)) AS lane(number)
        CROSS JOIN LATERAL (
            SELECT m.breaker_key, m.reason_code, m.first_attempt_at
            FROM pgoutbox.message_view AS m
            WHERE m.queue = l.queue AND m.lane = lane.number AND m.state = 'pending' AND m.ordering_key IS NULL
            ORDER BY m.available_at LIMIT l.rows
        ) AS found
        UNION ALL
        (
            SELECT 3, m.breaker_key, m.reason_code, m.first_attempt_at
            FROM pgoutbox.message_view AS m
            WHERE m.queue = l.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
                -- Always true: it permits the index message_live_ordered_due.
                AND m.available_at > '-infinity'
            ORDER BY m.available_at LIMIT l.rows
        )
    ) AS m
) AS one
WHERE one.reason_code = 'stalled'
    AND one.first_attempt_at < now() - make_interval(secs => %(seconds)s::float8)
GROUP BY one.breaker_key
ORDER BY oldest_seconds DESC
LIMIT 20
