-- Delete claims of this worker whose attempts have all ended. One that is being renewed is left to forget_lapsed.sql:
-- two statements that wait for several claims could deadlock.
DELETE FROM pgoutbox.claim AS c
USING (
    SELECT e.claimed_at
    FROM pgoutbox.claim AS e
    WHERE e.worker = %(worker)s::text AND e.claimed_at = ANY (%(ended_claims)s::timestamptz[])
    FOR UPDATE SKIP LOCKED
) AS ended
WHERE c.worker = %(worker)s::text AND c.claimed_at = ended.claimed_at
