-- The last attempts of a message, newest first.
SELECT
    a.attempt_count,
    a.times,
    a.outcome,
    a.worker,
    a.started_at,
    a.ended_at,
    a.error,
    a.reason_code,
    a.breaker_key,
    a.error_place
FROM pgoutbox.attempt_view AS a
WHERE a.message_id = %(id)s::bigint
ORDER BY a.attempt_count DESC
