-- The attempts that claim_lapsed.sql would take over, see find_fresh.sql.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND m.queue = %(queue)s::text
        AND ending.state IS NULL
        -- They are suspects: one of them may have crashed its process, and may do so again. A total of 1 takes the
        -- suspect that has waited longest. A greater total takes only suspects that can afford another loss: those with
        -- more than half of their granted attempts left.
        AND (%(total)s::bigint = 1 OR m.max_attempts - m.attempt_count > m.attempt_budget / 2)
    ORDER BY m.lease_expires_at, m.id
    -- permits() locks the row of a limited queue until the commit, so that its claims run one after the other.
    LIMIT pgoutbox._permits(%(queue)s::text, %(total)s::bigint)
    -- Another claim may have locked a row. It is skipped, because a wait would fail with 40001 when the row moves to
    -- another partition.
    FOR UPDATE OF m SKIP LOCKED
)
SELECT j.id
FROM judged AS j
