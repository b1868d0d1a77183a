-- The attempts of each message, the one that sent it too, with redacted errors. Attempts in a row that were postponed
-- alike are one row.
CREATE VIEW pgoutbox.attempt_view AS
SELECT
    m.id AS message_id,
    m.state AS message_state,
    a.attempt_count,
    a.times,
    a.outcome,
    a.worker,
    a.started_at,
    a.ended_at,
    pgoutbox._redacted_text(a.error) AS error,
    pgoutbox._redacted_text(pgoutbox._cause_of(a.error)) AS cause,
    a.reason_code,
    a.breaker_key,
    a.error_place
FROM pgoutbox.message AS m
CROSS JOIN LATERAL jsonb_populate_recordset(NULL::pgoutbox.attempt, m.attempts) AS a
UNION ALL
SELECT m.id, m.state, m.attempt_count, 1, m.state, m.worker, m.claimed_at, m.finished_at, NULL, NULL, NULL, NULL, NULL
FROM pgoutbox.message AS m
WHERE m.state = 'sent';
