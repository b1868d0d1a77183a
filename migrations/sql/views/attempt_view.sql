CREATE VIEW pgoutbox.attempt_view AS
SELECT
    a.message_id,
    a.attempt_count,
    a.outcome,
    a.worker,
    a.started_at,
    a.ended_at,
    pgoutbox._redacted_text(a.error) AS error,
    a.reason_code,
    a.breaker_key,
    a.error_place
FROM pgoutbox.attempt AS a;

COMMENT ON VIEW pgoutbox.attempt_view IS 'The attempts that did not end as sent, with redacted errors.';
