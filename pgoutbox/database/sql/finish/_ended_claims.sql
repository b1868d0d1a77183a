-- Delete claims of this worker whose attempts have all ended. The worker names those that have ended in its memory; a claim
-- with an attempt in flight stays all the same, because nobody would find that attempt without it.
-- One that is being renewed is left to forget_lapsed.sql: two statements that wait for several claims could deadlock.
DELETE FROM pgoutbox.claim AS c
USING (
    SELECT e.claimed_at
    FROM pgoutbox.claim AS e
    WHERE e.worker = %(worker)s::text
        AND e.claimed_at = ANY (%(ended_claims)s::timestamptz[])
        AND NOT EXISTS (
            SELECT FROM pgoutbox.in_flight_view AS v WHERE v.worker = e.worker AND v.claimed_at = e.claimed_at
        )
    FOR UPDATE SKIP LOCKED
) AS ended
WHERE c.worker = %(worker)s::text AND c.claimed_at = ended.claimed_at
