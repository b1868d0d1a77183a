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
            'infinity'::timestamptz AS until_at,
            least(%(rows)s::bigint / 10, greatest(5, %(rows)s::bigint / count(*) OVER ())) AS rows
        FROM unnest(%(names)s::text[]) AS named(queue)
    ) AS l
    CROSS JOIN LATERAL (
        \ir _pending.sql
    ) AS m
) AS one
WHERE one.reason_code = 'stalled'
    AND one.first_attempt_at < now() - make_interval(secs => %(seconds)s::float8)
GROUP BY one.breaker_key
ORDER BY oldest_seconds DESC
LIMIT 20
