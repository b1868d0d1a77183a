-- Claim up to `total` due messages that were never attempted, those with the earliest due time first. The worker runs
-- this for queues without limits. Messages with an ordering key have their own lane, see find_ordered.sql.
-- The parts: `due` chooses and locks rows (_due.sql), `judged` decides between `sending` and `skipped` (_judged.sql),
-- the UPDATE writes that (_begin.sql). The worker holds the locks until it commits, right after this statement.
-- Guards: row locks, the check of state and attempt count in the UPDATE, the unique index on keys in flight.
WITH due AS MATERIALIZED (
    \ir _due.sql
        -- This lane has the index message_live_fresh, so that a backlog of retries never delays fresh messages.
        -- A message that was never attempted is always pending.
        AND m.attempt_count = 0
        -- The floor is the last row of the previous claim of this lane, null and 0 for none. The scan starts after it
        -- and does not step over the dead index entries of claimed messages again. Earlier rows that were locked, had
        -- to wait or were committed late are not lost: the worker often claims from the beginning of the lane.
        AND (m.available_at, m.id) > (coalesce(%(floor_at)s::timestamptz, '-infinity'), %(floor_id)s::bigint)
        -- Queues that are paused or have limits are left to the claims by permits.
        AND NOT pgoutbox._is_limited(%(queue)s::text)
    ORDER BY m.available_at, m.id
    LIMIT %(total)s::bigint
    -- Another claim may have locked a row. It is skipped, because a wait would fail with 40001 when the row moves to
    -- another partition.
    FOR UPDATE OF m SKIP LOCKED
), judged AS MATERIALIZED (
    \ir _judged.sql
)
\ir _begin.sql
RETURNING
    \ir _returned.sql
