-- Delete claims of this worker whose attempts have all ended. The worker names those that have ended in its memory; a claim
-- with an attempt in flight stays all the same, because nobody would find that attempt without it.
-- One that is being renewed is left to forget_lapsed.sql: two statements that wait for several claims could deadlock.
DELETE FROM pgoutbox.claim AS c
-- By place, and not by a join: statistics may describe a table with one claim, and a join would then visit each claim of
-- the worker for each one that has ended.
WHERE c.ctid = ANY (ARRAY(
    SELECT ended.place
    FROM unnest(%(ended_claims)s::timestamptz[]) AS named(claimed_at)
    CROSS JOIN LATERAL (
        SELECT e.ctid AS place
        FROM pgoutbox.claim AS e
        WHERE e.worker = %(worker)s::text
            AND e.claimed_at = named.claimed_at
            \ir _without_attempts.sql
        FOR UPDATE SKIP LOCKED
    ) AS ended
))
