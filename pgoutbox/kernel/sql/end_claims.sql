-- Delete claims of this worker whose attempts have ended. One with an attempt in flight stays all the same: nobody
-- would find that attempt without it. So does one that a renewal has just written or locked. It is not renewed without
-- attempts in flight, and forget_lapsed.sql deletes it.
DELETE FROM pgoutbox.claim AS c
-- By place: a join would visit each claim of the worker for each one that has ended.
WHERE c.ctid = ANY (ARRAY(
    SELECT ended.place
    FROM unnest(%(claimed_ats)s::timestamptz[]) AS named(claimed_at)
    CROSS JOIN LATERAL (
        SELECT e.ctid AS place
        FROM pgoutbox.claim AS e
        WHERE e.worker = %(worker)s::text
            AND e.claimed_at = named.claimed_at
            AND NOT EXISTS (
                SELECT FROM pgoutbox.message_live AS m
                WHERE m.id = ANY (e.ids) AND m.state = 'sending' AND m.worker = e.worker
                    AND m.claimed_at = e.claimed_at
                OFFSET 0
            )
        FOR UPDATE SKIP LOCKED
    ) AS ended
))
