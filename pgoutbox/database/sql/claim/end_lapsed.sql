-- End up to `total` lapsed attempts of these queues. Most messages are pending again. They fall due one after the other,
-- `distance_seconds` apart, because one of them may have crashed its process and may do so again. Like
-- finish_if_held.sql, this enqueues the messages for the hooks of messages that fail. claim_lapsed.sql takes the other
-- messages.
-- Guards: row locks, and the place of the row in the UPDATE.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND ending.state <> 'sending'
        -- Other queues may no longer have a worker. There only superseded messages end, because a newer message of their
        -- key waits for them.
        AND (c.queue = ANY (%(queues)s::text[]) OR head.newest_id IS NOT NULL)
    ORDER BY c.lease_expires_at, m.id
    \ir _locked.sql
    FOR UPDATE OF c SKIP LOCKED
), finished AS (
    UPDATE pgoutbox.message AS m
    SET state = j.state,
        key_in_flight = NULL,
        lane = 1,
        available_at = CASE
            WHEN j.state = 'pending' THEN now() + make_interval(secs => %(distance_seconds)s::float8 * (j.number - 1)) ELSE m.available_at
        END,
        finished_at = CASE WHEN j.state <> 'pending' THEN now() END,
        skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.newer_id, 'expired') END,
        superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END,
        last_error = 'attempt ' || j.attempt_count || ': lease of ' || j.worker || ' expired, outcome unknown',
        attempts =
            \ir _lost.sql
    FROM (
        SELECT *, count(*) FILTER (WHERE state = 'pending') OVER (ROWS UNBOUNDED PRECEDING) AS number
        FROM judged
    ) AS j
    -- `place` is where the row was locked. A row that has changed since this statement's snapshot does not match. The
    -- state restricts the plan to one partition.
    WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'sending'
    RETURNING m.id, m.topic, m.queue, m.attempt_count, m.coalesce_key, m.ordering_key, m.state,
        extract(epoch FROM m.available_at - now())::float8 AS due_seconds,
        \ir ../finish/_failure.sql
), announced AS MATERIALIZED (
    \ir ../finish/_announced.sql
)
SELECT f.id, f.topic, f.queue, f.attempt_count, f.coalesce_key, f.ordering_key, f.state, f.due_seconds
FROM finished AS f
-- The outer join makes PostgreSQL run the CTE, which is a SELECT.
LEFT JOIN announced AS a ON a.id = f.id
