-- The open breakers, newest first.
SELECT
    b.key,
    b.opened_at,
    b.retry_at,
    b.probe_until,
    b.cooldown_seconds,
    b.worker,
    b.last_error
FROM pgoutbox.breaker_view AS b
ORDER BY b.opened_at DESC
LIMIT 100
