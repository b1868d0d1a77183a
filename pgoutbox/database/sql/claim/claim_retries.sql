-- Claim up to `total` due messages that were attempted before, those with the earliest due time first. The worker runs
-- this for queues without limits. The parts are those of claim_fresh.sql.
WITH judged AS MATERIALIZED (
    \ir _due.sql
        \ir _retries.sql
        -- Queues that are paused or have limits are left to the claims by permits.
        AND NOT pgoutbox._is_limited(%(queue)s::text)
    ORDER BY m.available_at, m.id
    \ir _locked.sql
), claim AS (
    \ir _claim.sql
)
\ir _begin.sql
