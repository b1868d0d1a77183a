-- The messages in flight of each worker, up to `limit` of each, those that have run longest first; among a sample of `cap`
-- messages.
SELECT held.worker, held.id, held.topic, held.queue, held.claimed_at, held.lease_expires_at
FROM (
    SELECT
        sample.*,
        row_number() OVER (PARTITION BY sample.worker ORDER BY sample.claimed_at, sample.id) AS place
    FROM (
        SELECT m.worker, m.id, m.topic, m.queue, m.claimed_at, m.lease_expires_at
        FROM pgoutbox.in_flight_view AS m
        LIMIT %(cap)s::bigint
    ) AS sample
) AS held
WHERE held.place <= %(limit)s::bigint
ORDER BY held.worker, held.place
