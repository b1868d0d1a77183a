-- A run of `worker --once` or `--drain` ends. Its row replaces those of earlier runs that served nothing else, so each line
-- of a crontab has one. `failures` has the failures in a row of each breaker that this run has used; those of others are
-- taken from the run that ended last. Overlapping runs may lose a failure, and then the breaker opens a run later.
WITH own AS (
    SELECT w.name, w.queues, w.topics
    FROM pgoutbox.worker AS w
    WHERE w.name = %(worker)s::text
), last AS (
    SELECT w.failures
    FROM pgoutbox.worker AS w
    WHERE w.ended_at IS NOT NULL
    ORDER BY w.ended_at DESC
    LIMIT 1
), replaced AS MATERIALIZED (
    SELECT w.name, w.ended_at, w.queues = o.queues AS is_same_line
    FROM pgoutbox.worker AS w
    CROSS JOIN own AS o
    WHERE w.ended_at IS NOT NULL
        AND ((w.queues <@ o.queues AND w.topics <@ o.topics) OR w.ended_at < now() - interval '25 hours')
    -- Runs that end at the same time do not wait for each other.
    ORDER BY w.name
    FOR UPDATE OF w SKIP LOCKED
), gone AS (
    DELETE FROM pgoutbox.worker AS w
    USING replaced AS r
    WHERE w.name = r.name
)
UPDATE pgoutbox.worker AS w
SET ended_at = now(),
    seen_at = now(),
    run_interval_seconds = (
        SELECT greatest(extract(epoch FROM now() - r.ended_at)::float8, 0)
        FROM replaced AS r
        WHERE r.is_same_line
        ORDER BY r.ended_at DESC
        LIMIT 1
    ),
    -- A destination that is used once and never again would stay here, so their number has a limit.
    failures = jsonb_strip_nulls(
        CASE WHEN octet_length(l.failures::text) <= 100000 THEN l.failures ELSE '{}' END || %(failures)s::jsonb
    )
FROM own AS o
LEFT JOIN last AS l ON true
WHERE w.name = o.name
RETURNING w.name
