-- The number of workers with a valid lease.
SELECT count(DISTINCT held.worker) AS workers
FROM (
    SELECT v.worker
    FROM pgoutbox.in_flight_view AS v
    WHERE v.lease_expires_at > now()
    LIMIT 10000
) AS held
