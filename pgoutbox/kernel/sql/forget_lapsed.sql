-- Delete the lapsed claims that have no attempt in flight: other workers have taken them over, or their worker
-- stopped before it deleted the claim. Extend the leases of released messages.
WITH extended AS (
    -- `pgoutbox.release` gives a message in flight a claim of its own, with the lease that its worker (`released_from`)
    -- had. Until the release is committed, which may be long after, that worker renews its own claim, and the attempt
    -- goes on. So when the copied lease has ended, it is extended to the present one of the worker. Only once, which ''
    -- notes: a process that hangs renews its leases for ever.
    UPDATE pgoutbox.claim AS c
    SET lease_expires_at = greatest(c.lease_expires_at, r.lease_expires_at), released_from = ''
    FROM (
        SELECT l.worker, l.claimed_at, (
            SELECT held.lease_expires_at
            FROM pgoutbox.claim AS held
            WHERE held.worker = l.released_from AND held.claimed_at = l.claimed_at
        ) AS lease_expires_at
        FROM pgoutbox.claim AS l
        WHERE l.lease_expires_at <= now() AND l.released_from <> ''
        FOR UPDATE OF l SKIP LOCKED
    ) AS r
    WHERE c.worker = r.worker AND c.claimed_at = r.claimed_at
)
DELETE FROM pgoutbox.claim AS c
-- By place for the reason in end_claims.sql.
WHERE c.ctid = ANY (ARRAY(
    SELECT e.ctid
    FROM pgoutbox.claim AS e
    WHERE e.lease_expires_at <= now()
        -- One statement must not write a row twice.
        AND coalesce(e.released_from, '') = ''
        -- The claim `e` has no attempt in flight. This is the condition of in_flight_view, which would read all claims.
        AND NOT EXISTS (
            SELECT FROM pgoutbox.message_live AS begun
            WHERE begun.id = ANY (e.ids)
                AND begun.state = 'sending'
                AND begun.worker = e.worker
                AND begun.claimed_at = e.claimed_at
            OFFSET 0
        )
    -- Only claims without attempts are locked: the lock of another one would hide its attempts from the workers that take
    -- them over.
    FOR UPDATE SKIP LOCKED
))
