-- Messages of the given queues that were due for the first time longer than `seconds` ago, and are still undelivered, by
-- queue: whatever their due time now. The queues share `rows`.
SELECT
    u.queue,
    count(*) AS messages,
    bool_or(u.is_capped) AS is_capped,
    extract(epoch FROM now() - min(u.due_at))::float8 AS oldest_seconds,
    (array_agg(u.id ORDER BY u.due_at, u.id))[1] AS oldest_id
FROM (
    SELECT l.queue, one.id, one.due_at, l.until_at, count(*) OVER (PARTITION BY l.queue, one.part) >= l.rows AS is_capped
    FROM (
        SELECT
            named.queue,
            now() - make_interval(secs => %(seconds)s::float8) AS until_at,
            greatest(2, %(rows)s::bigint / count(*) OVER ()) AS rows,
            greatest(2, %(rows)s::bigint / count(*) OVER ()) AS fresh_rows
        FROM unnest(%(names)s::text[]) AS named(queue)
    ) AS l
    CROSS JOIN LATERAL (
        \ir _undelivered.sql
    ) AS one
) AS u
WHERE u.due_at < u.until_at
GROUP BY u.queue
ORDER BY oldest_seconds DESC
LIMIT 50
