-- Messages that ended in the last `seconds`, by queue and topic, for live displays. They are found by the block ranges
-- of finished_at.
SELECT
    m.queue,
    m.topic,
    count(*) FILTER (WHERE m.state = 'sent') AS sent,
    count(*) AS ended
FROM pgoutbox.message_view AS m
WHERE m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    AND m.finished_at > now() - make_interval(secs => %(seconds)s::float8)
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text)
GROUP BY m.queue, m.topic
