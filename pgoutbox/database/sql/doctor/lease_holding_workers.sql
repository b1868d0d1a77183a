-- The number of workers with a valid lease.
SELECT count(DISTINCT held.worker) AS workers
FROM (
    SELECT m.worker
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'sending' AND m.lease_expires_at > now()
    LIMIT 10000
) AS held
