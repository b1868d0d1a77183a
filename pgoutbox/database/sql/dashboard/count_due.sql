-- The numbers of pending messages that are due, that are due later, and that have failed an attempt, among `cap` of them in no
-- order.
SELECT
    count(*) FILTER (WHERE pending.available_at <= now()),
    count(*) FILTER (WHERE pending.available_at > now()),
    count(*) FILTER (WHERE pending.used_count > 0)
FROM (
    -- Attempts without snoozes, releases and postponements, which raise max_attempts.
    SELECT m.available_at, m.attempt_count + m.attempt_budget - m.max_attempts AS used_count
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'pending'
    LIMIT %(cap)s::bigint
) AS pending
