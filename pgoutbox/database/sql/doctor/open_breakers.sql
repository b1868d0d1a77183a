-- The open breakers, oldest first.
SELECT
    b.key,
    extract(epoch FROM now() - b.opened_at)::float8 AS open_seconds,
    left(b.last_error, 300) AS last_error
FROM pgoutbox.breaker_view AS b
ORDER BY b.opened_at
LIMIT 20
