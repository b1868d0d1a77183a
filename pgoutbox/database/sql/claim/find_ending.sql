-- The attempts that end_lapsed.sql would end, see find_fresh.sql.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND m.queue = %(queue)s::text
        AND ending.state IS NOT NULL
    ORDER BY m.lease_expires_at, m.id
    LIMIT %(total)s::bigint
    -- Another claim may have locked a row. It is skipped, because a wait would fail with 40001 when the row moves to
    -- another partition.
    FOR UPDATE OF m SKIP LOCKED
)
SELECT j.id
FROM judged AS j
