-- The messages that match the filter, newest first, up to `limit` before the id `before_id`. The columns are in the order of
-- `ListedMessage`.
SELECT
    m.id,
    m.topic,
    m.queue,
    m.destination,
    m.state,
    m.attempt_count,
    m.max_attempts,
    m.attempt_budget,
    m.created_at,
    m.available_at,
    m.finished_at,
    m.coalesce_key,
    m.dedupe_key,
    m.fair_key,
    m.skip_reason,
    m.last_error
FROM pgoutbox.message_view AS m
WHERE
    \ir _matches.sql
    AND (%(before_id)s::bigint IS NULL OR m.id < %(before_id)s::bigint)
ORDER BY m.id DESC
LIMIT %(limit)s::bigint
