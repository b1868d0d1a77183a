-- The attempts that claim_lapsed.sql would take over, see find_fresh.sql.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        \ir _suspects.sql
    ORDER BY m.lease_expires_at, m.id
    \ir _locked_by_permits.sql
)
SELECT j.id
FROM judged AS j
