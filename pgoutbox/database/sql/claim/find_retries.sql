-- The messages that claim_retries.sql or claim_retries_by_permits.sql would claim, see find_fresh.sql.
WITH due AS MATERIALIZED (
    \ir _due.sql
        \ir _retries.sql
    ORDER BY m.available_at, m.id
    \ir _locked_by_permits.sql
)
SELECT d.id
FROM due AS d
