-- Schedules whose names begin with a prefix, the next one first.
SELECT
    s.name,
    s.topic,
    s.queue,
    s.rule,
    s.timezone,
    s.missed,
    s.is_declared,
    s.next_at,
    s.last_at,
    s.last_message_id,
    s.until_at,
    s.paused_at,
    s.ended_at,
    s.problem,
    now() AS asked_at
FROM pgoutbox.schedule_view AS s
WHERE starts_with(s.name, %(prefix)s::text)
ORDER BY s.next_at, s.name
LIMIT %(limit)s::bigint
