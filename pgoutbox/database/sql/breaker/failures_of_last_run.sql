-- The failures in a row, by breaker, that the last run of `worker --once` hands to the next one.
SELECT r.failures
FROM pgoutbox.worker_run AS r
