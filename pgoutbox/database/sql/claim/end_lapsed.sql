-- End up to `total` lapsed attempts of a queue whose message is not tried again. The worker runs this before
-- claim_lapsed.sql. It is a separate statement because these attempts do not wait for a limit: a newer message of their
-- key may wait for them.
-- Guards: row locks, and the check of state and attempt count in the UPDATE.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND m.queue = %(queue)s::text
        AND ending.state IS NOT NULL
    ORDER BY m.lease_expires_at, m.id
    LIMIT %(total)s::bigint
    -- Another claim may have locked a row. It is skipped, because a wait would fail with 40001 when the row moves to
    -- another partition.
    FOR UPDATE OF m SKIP LOCKED
), lost AS (
    \ir _lost.sql
)
UPDATE pgoutbox.message AS m
SET state = j.state,
    lease_expires_at = NULL,
    finished_at = now(),
    skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.newer_id, 'expired') END,
    superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END,
    last_error = 'attempt ' || j.attempt_count || ': lease of ' || j.worker || ' expired, outcome unknown'
FROM judged AS j
-- `place` is where the row was locked; the fence refuses a row that has changed since then.
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'sending' AND m.attempt_count = j.attempt_count
RETURNING
    \ir _returned.sql
    , m.queue
