-- The keys of the open breakers. A worker that sends asks once a minute, to close those that it sends through.
SELECT b.key
FROM pgoutbox.breaker AS b
ORDER BY b.opened_at
LIMIT 1000
