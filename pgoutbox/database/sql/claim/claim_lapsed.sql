-- Take over up to `total` lapsed attempts of a queue whose message is tried again. The attempt before is recorded as
-- lost.
-- Guards: row locks, and the check of state and attempt count in the UPDATE.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND m.queue = %(queue)s::text
        AND ending.state IS NULL
        -- They are suspects: one of them may have crashed its process, and may do so again. A total of 1 takes the
        -- suspect that has waited longest. A greater total takes only suspects that can afford another loss: those with
        -- more than half of their granted attempts left.
        AND (%(total)s::bigint = 1 OR m.max_attempts - m.attempt_count > m.attempt_budget / 2)
    ORDER BY m.lease_expires_at, m.id
    -- permits() locks the row of a limited queue until the commit, so that its claims run one after the other.
    LIMIT pgoutbox._permits(%(queue)s::text, %(total)s::bigint)
    -- Another claim may have locked a row. It is skipped, because a wait would fail with 40001 when the row moves to
    -- another partition.
    FOR UPDATE OF m SKIP LOCKED
), spent AS (
    \ir _spent.sql
), lost AS (
    \ir _lost.sql
)
UPDATE pgoutbox.message AS m
SET attempt_count = m.attempt_count + 1,
    claimed_at = now(),
    worker = %(worker)s::text,
    lease_expires_at = now() + make_interval(secs => %(lease_seconds)s::float8),
    last_error = 'attempt ' || j.attempt_count || ': lease of ' || j.worker || ' expired, outcome unknown'
FROM judged AS j
-- `place` is where the row was locked; the fence refuses a row that has changed since then.
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'sending' AND m.attempt_count = j.attempt_count
RETURNING
    \ir _returned.sql
