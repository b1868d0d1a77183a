-- claim_retries.sql for a queue that is paused or has limits: the claim begins at most as many attempts as the queue
-- has permits, and takes a token of the rate for each.
WITH due AS MATERIALIZED (
    \ir _due.sql
        -- This lane has the index message_live_retry, so that retries and fresh messages do not delay each other.
        AND m.attempt_count > 0 AND m.state = 'pending'
        -- The floor is the last row of the previous claim of this lane, null and 0 for none. The scan starts after it
        -- and does not step over the dead index entries of claimed messages again. Earlier rows that were locked, had
        -- to wait or were committed late are not lost: the worker often claims from the beginning of the lane.
        AND (m.available_at, m.id) > (coalesce(%(floor_at)s::timestamptz, '-infinity'), %(floor_id)s::bigint)
    ORDER BY m.available_at, m.id
    -- permits() locks the row of a limited queue until the commit, so that its claims run one after the other.
    LIMIT pgoutbox._permits(%(queue)s::text, %(total)s::bigint)
    -- Another claim may have locked a row. It is skipped, because a wait would fail with 40001 when the row moves to
    -- another partition.
    FOR UPDATE OF m SKIP LOCKED
), judged AS MATERIALIZED (
    \ir _judged.sql
), spent AS (
    \ir _spent.sql
)
\ir _begin.sql
RETURNING
    \ir _returned.sql
