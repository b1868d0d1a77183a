-- The failures in a row, by breaker, that the last run of `worker --once` hands to the next one.
SELECT w.failures
FROM pgoutbox.worker AS w
WHERE w.ended_at IS NOT NULL
ORDER BY w.ended_at DESC
LIMIT 1
