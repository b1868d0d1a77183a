-- The number of finished messages that a prune would delete, by state.
SELECT m.state, count(*)
FROM pgoutbox.message_view AS m
WHERE m.state = ANY (%(states)s::text[])
    AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    AND m.finished_at < now() - make_interval(secs => %(older_than_seconds)s::float8)
    AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
GROUP BY m.state
ORDER BY m.state
