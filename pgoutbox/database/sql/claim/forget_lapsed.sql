-- Delete the lapsed claims that have no attempt in flight: other workers have taken them over, or their worker
-- stopped before it deleted the claim.
DELETE FROM pgoutbox.claim AS c
USING (
    SELECT l.worker, l.claimed_at
    FROM pgoutbox.claim AS l
    WHERE l.lease_expires_at <= now()
        AND NOT EXISTS (
            SELECT FROM pgoutbox.in_flight_view AS v WHERE v.worker = l.worker AND v.claimed_at = l.claimed_at
        )
    -- Only claims without attempts are locked: the lock of another one would hide its attempts from the workers that take
    -- them over.
    FOR UPDATE SKIP LOCKED
) AS ended
WHERE c.worker = ended.worker AND c.claimed_at = ended.claimed_at
