-- Write what the CTE `judged` has decided about lapsed attempts that are not tried again.
UPDATE pgoutbox.message AS m
SET state = j.state,
    lease_expires_at = NULL,
    finished_at = now(),
    skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.newer_id, 'expired') END,
    superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END,
    last_error = 'attempt ' || j.attempt_count || ': lease of ' || j.worker || ' expired, outcome unknown'
FROM judged AS j
-- `place` is where the row was locked; the fence refuses a row that has changed since then.
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'sending' AND m.attempt_count = j.attempt_count
RETURNING
    \ir _returned.sql
    , m.queue
