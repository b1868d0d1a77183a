-- The schedules, without what their messages contain.
CREATE VIEW pgoutbox.schedule_view AS
SELECT
    s.name,
    s.rule,
    s.timezone,
    s.message ->> 'topic' AS topic,
    coalesce(s.message ->> 'queue', 'default') AS queue,
    s.missed,
    s.jitter,
    s.until_at,
    s.is_declared,
    s.next_at,
    s.last_at,
    s.last_message_id,
    s.paused_at,
    s.changed_at,
    s.ended_at,
    s.problem
FROM pgoutbox.schedule AS s;
