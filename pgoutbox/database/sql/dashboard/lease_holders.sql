-- The workers that hold leases, from a sample of `cap` messages. The database does not know a worker without a lease.
SELECT
    held.worker,
    count(*) AS in_flight,
    count(*) FILTER (WHERE held.lease_expires_at <= now()) AS lapsed,
    min(held.claimed_at) AS oldest_claim_at,
    max(held.lease_expires_at) AS last_lease_at,
    (array_agg(DISTINCT held.queue ORDER BY held.queue))[1:10] AS queues
FROM (
    SELECT m.worker, m.queue, m.claimed_at, m.lease_expires_at
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'sending' AND m.lease_expires_at IS NOT NULL
    LIMIT %(cap)s::bigint
) AS held
GROUP BY held.worker
ORDER BY held.worker
LIMIT 200
