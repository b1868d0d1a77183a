-- End up to `total` lapsed attempts of a queue whose message is not tried again. The worker runs this before
-- claim_lapsed.sql. It is a separate statement because these attempts do not wait for a limit: a newer message of their
-- key may wait for them. Like finish_if_held.sql, it enqueues the messages for the hooks of messages that fail.
-- Guards: row locks, and the place of the row in the UPDATE.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND c.queue = %(queue)s::text
        AND ending.state IS NOT NULL
    ORDER BY c.lease_expires_at, m.id
    \ir _locked.sql
    FOR SHARE OF c SKIP LOCKED
), lost AS (
    \ir _lost.sql
), finished AS (
    \ir _end.sql
    ,
    \ir ../finish/_failure.sql
), announced AS MATERIALIZED (
    \ir ../finish/_announced.sql
)
SELECT
    f.id, f.topic, f.destination, f.payload_json, f.headers_json, f.attempt_count, f.max_attempts, f.attempt_budget,
    f.created_at, f.available_at, f.coalesce_key, f.ordering_key, f.content_id, f.claimed_at, f.state,
    f.expires_in_seconds, f.queue
FROM finished AS f
-- The outer join makes PostgreSQL run the CTE, which is a SELECT.
LEFT JOIN announced AS a ON a.id = f.id
