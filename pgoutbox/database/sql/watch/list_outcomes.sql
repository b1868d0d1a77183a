-- Outcomes of attempts since `ended_from`, page by page in the order of their ends. For a message that is pending again
-- only the last attempt is looked up.
SELECT o.ended_at, o.message_id, o.attempt_count, o.outcome, o.topic, o.queue, o.destination, o.worker, o.reason
FROM (
    SELECT
        m.finished_at AS ended_at,
        m.id AS message_id,
        m.attempt_count,
        m.state AS outcome,
        m.topic,
        m.queue,
        m.destination,
        m.worker,
        CASE m.state WHEN 'sent' THEN NULL WHEN 'skipped' THEN m.skip_reason ELSE m.last_error END AS reason
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('sent', 'failed', 'skipped', 'cancelled') AND m.finished_at >= %(ended_from)s::timestamptz
    UNION ALL
    SELECT
        a.ended_at,
        a.message_id,
        a.attempt_count,
        a.outcome,
        m.topic,
        m.queue,
        m.destination,
        a.worker,
        a.error AS reason
    FROM pgoutbox.message_view AS m
    JOIN pgoutbox.attempt_view AS a
        ON a.message_id = m.id
        AND a.message_state = m.state
        -- With this condition only the partition of live messages is read.
        AND a.message_state IN ('pending', 'sending')
        AND a.attempt_count = m.attempt_count - CASE m.state WHEN 'sending' THEN 1 ELSE 0 END
    WHERE m.state IN ('pending', 'sending') AND m.attempt_count > 0 AND a.ended_at >= %(ended_from)s::timestamptz
) AS o
WHERE (%(topic)s::text IS NULL OR o.topic = %(topic)s::text)
    AND (%(queue)s::text IS NULL OR o.queue = %(queue)s::text)
    AND (%(outcomes)s::text[] IS NULL OR o.outcome = ANY (%(outcomes)s::text[]))
    AND (
        %(after_ended_at)s::timestamptz IS NULL
        OR (o.ended_at, o.message_id, o.attempt_count)
            > (%(after_ended_at)s::timestamptz, %(after_id)s::bigint, %(after_count)s::integer)
    )
ORDER BY o.ended_at, o.message_id, o.attempt_count
LIMIT %(limit)s::bigint
