-- Delete claims of this worker whose attempts have all ended. The worker names those that have ended in its memory; a claim
-- with an attempt in flight stays all the same, because nobody would find that attempt without it.
-- One that is being renewed is left to forget_lapsed.sql: two statements that wait for several claims could deadlock.
DELETE FROM pgoutbox.claim AS c
-- By place, and not by a join: statistics may describe a table with one claim, and a join would then visit each claim of
-- the worker for each one that has ended.
WHERE c.ctid = ANY (ARRAY(
    SELECT e.place
    FROM unnest(%(ended_claims)s::timestamptz[]) AS named(claimed_at)
    CROSS JOIN LATERAL (
        SELECT k.ctid AS place
        FROM pgoutbox.claim AS k
        WHERE k.worker = %(worker)s::text
            AND k.claimed_at = named.claimed_at
            -- The condition of in_flight_view.
            AND NOT EXISTS (
                SELECT FROM pgoutbox.message_live AS begun
                WHERE begun.id = ANY (k.ids)
                    AND begun.state = 'sending'
                    AND begun.worker = k.worker
                    AND begun.claimed_at = k.claimed_at
                OFFSET 0
            )
        FOR UPDATE SKIP LOCKED
    ) AS e
))
