-- Open circuit breakers of transports and destinations.
CREATE VIEW pgoutbox.breaker_view AS
SELECT
    b.key,
    b.opened_at,
    b.retry_at,
    b.cooldown_seconds,
    b.probe_until,
    b.worker,
    pgoutbox._redacted_text(b.last_error) AS last_error,
    b.holds
FROM pgoutbox.breaker AS b;
