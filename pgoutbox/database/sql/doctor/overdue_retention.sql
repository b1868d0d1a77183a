-- Rules that should have deleted messages long ago, each with one such message.
SELECT r.topic, r.state, extract(epoch FROM now() - old.finished_at - r.keep)::float8 AS overdue_seconds
FROM pgoutbox.retention_view AS r
CROSS JOIN LATERAL (
    SELECT m.finished_at
    FROM pgoutbox.message_view AS m
    WHERE m.state = r.state
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at < now() - r.keep - make_interval(secs => %(seconds)s::float8)
        AND (
            m.topic = r.topic
            OR (
                r.topic = '*'
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention_view AS own WHERE own.topic = m.topic AND own.state = m.state
                )
            )
        )
    LIMIT 1
) AS old
WHERE r.keep IS NOT NULL
ORDER BY r.topic, r.state
LIMIT 20
