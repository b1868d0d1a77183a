-- Delete the lapsed claims that have no attempt in flight: other workers have taken them over, or their worker
-- stopped before it deleted the claim.
DELETE FROM pgoutbox.claim AS c
-- By place for the reason in _ended_claims.sql.
WHERE c.ctid = ANY (ARRAY(
    SELECT l.ctid
    FROM pgoutbox.claim AS l
    WHERE l.lease_expires_at <= now()
        -- The condition of in_flight_view.
        AND NOT EXISTS (
            SELECT FROM pgoutbox.message_live AS begun
            WHERE begun.id = ANY (l.ids)
                AND begun.state = 'sending'
                AND begun.worker = l.worker
                AND begun.claimed_at = l.claimed_at
            OFFSET 0
        )
    -- Only claims without attempts are locked: the lock of another one would hide its attempts from the workers that take
    -- them over.
    FOR UPDATE SKIP LOCKED
))
