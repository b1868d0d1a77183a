-- The workers that run or hold leases, and the last run; the leases are a sample of `cap` messages.
WITH holder AS (
    SELECT
        held.worker,
        count(*) AS in_flight,
        count(*) FILTER (WHERE held.lease_expires_at <= now()) AS lapsed,
        min(held.claimed_at) AS oldest_claim_at,
        max(held.lease_expires_at) AS last_lease_at,
        (array_agg(DISTINCT held.queue ORDER BY held.queue))[1:10] AS queues
    FROM (
        SELECT m.worker, m.queue, m.claimed_at, m.lease_expires_at
        FROM pgoutbox.in_flight_view AS m
        LIMIT %(cap)s::bigint
    ) AS held
    GROUP BY held.worker
)
SELECT
    coalesce(h.worker, v.name) AS worker,
    coalesce(h.in_flight, 0) AS in_flight,
    coalesce(h.lapsed, 0) AS lapsed,
    h.oldest_claim_at,
    h.last_lease_at,
    coalesce(v.queues, h.queues) AS queues,
    coalesce(v.topics, '{}') AS topics,
    v.version,
    v.slots,
    v.started_at,
    v.seen_at,
    v.ended_at
FROM holder AS h
FULL JOIN pgoutbox.worker_view AS v ON v.name = h.worker
ORDER BY 1
LIMIT 200
