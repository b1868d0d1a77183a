-- The pending messages of the queue `l` that fall due before `l.until_at`: the `l.rows` of each part that are due first. The
-- parts are fresh messages, retries, those that wait for their turn, and those with an ordering key. With
-- `has_failed` an attempt has failed: snoozes, releases and postponements raise both numbers. `breaker_key` and
-- `reason_code` are those of the last attempt.
(
    SELECT lane.number AS part, found.*
    FROM (VALUES (0), (1), (2)) AS lane(number)
    CROSS JOIN LATERAL (
        SELECT
            m.id,
            m.topic,
            m.payload_version,
            m.destination,
            m.ordering_key,
            m.attempt_count,
            m.available_at,
            m.attempt_count + m.attempt_budget > m.max_attempts AS has_failed,
            m.breaker_key,
            m.reason_code,
            m.first_attempt_at
        FROM pgoutbox.message_view AS m
        WHERE m.queue = l.queue AND m.lane = lane.number AND m.state = 'pending' AND m.ordering_key IS NULL
            AND m.available_at < l.until_at
        ORDER BY m.available_at LIMIT l.rows
    ) AS found
)
UNION ALL
(
    SELECT
        3,
        m.id,
        m.topic,
        m.payload_version,
        m.destination,
        m.ordering_key,
        m.attempt_count,
        m.available_at,
        m.attempt_count + m.attempt_budget > m.max_attempts,
        m.breaker_key,
        m.reason_code,
        m.first_attempt_at
    FROM pgoutbox.message_view AS m
    WHERE m.queue = l.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
        AND m.available_at < l.until_at
        -- Always true: it permits the index message_live_ordered_due.
        AND m.available_at > '-infinity'
    ORDER BY m.available_at LIMIT l.rows
)
