-- Schedules that enqueue nothing and are not paused. A worker looks twice a minute.
SELECT
    s.name,
    s.problem,
    s.ended_at,
    extract(epoch FROM now() - coalesce(s.next_at, s.changed_at))::float8 AS late_seconds
FROM pgoutbox.schedule_view AS s
WHERE s.paused_at IS NULL
    AND (
        s.problem IS NOT NULL
        OR s.ended_at IS NOT NULL AND s.until_at IS NULL
        OR s.ended_at IS NULL AND coalesce(s.next_at, s.changed_at) < now() - interval '2 minutes'
    )
ORDER BY s.name
LIMIT 20
