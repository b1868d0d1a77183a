-- claim_retries.sql for a queue that is paused or has limits: the claim begins at most as many attempts as the queue
-- has permits, and takes a token of the rate for each.
WITH judged AS MATERIALIZED (
    \ir _due.sql
        \ir _retries.sql
    ORDER BY m.available_at, m.id
    \ir _locked_by_permits.sql
), claim AS (
    \ir _claim.sql
), spent AS (
    \ir _spent.sql
)
\ir _begin.sql
