-- The attempts that end_lapsed.sql would end, see find_fresh.sql.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND m.queue = %(queue)s::text
        AND ending.state IS NOT NULL
    ORDER BY m.lease_expires_at, m.id
    \ir _locked.sql
)
SELECT j.id
FROM judged AS j
