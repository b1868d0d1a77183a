-- Write what the CTE `judged` has decided about lapsed attempts that are not tried again.
UPDATE pgoutbox.message AS m
SET state = j.state,
    key_in_flight = NULL,
    finished_at = now(),
    skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.newer_id, 'expired') END,
    superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END,
    last_error = 'attempt ' || j.attempt_count || ': lease of ' || j.worker || ' expired, outcome unknown'
FROM judged AS j
-- `place` is where the row was locked. A row that has changed since this statement's snapshot does not match. The state
-- restricts the plan to one partition.
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'sending'
RETURNING
    \ir _returned.sql
    , m.queue
