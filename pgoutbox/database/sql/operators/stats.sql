-- The number of messages in each state, by queue and topic. This reads all messages.
SELECT
    m.queue,
    m.topic,
    count(*) FILTER (WHERE m.state = 'pending' AND m.available_at <= now()) AS due,
    count(*) FILTER (WHERE m.state = 'pending' AND m.available_at > now()) AS scheduled,
    count(*) FILTER (WHERE m.state = 'sending') AS sending,
    count(*) FILTER (WHERE m.state = 'sent') AS sent,
    count(*) FILTER (WHERE m.state = 'failed') AS failed,
    count(*) FILTER (WHERE m.state = 'skipped') AS skipped,
    count(*) FILTER (WHERE m.state = 'cancelled') AS cancelled,
    extract(
        epoch FROM now() - min(m.available_at) FILTER (WHERE m.state = 'pending' AND m.available_at <= now())
    )::float8 AS oldest_due_seconds
FROM pgoutbox.message_view AS m
WHERE %(queue)s::text IS NULL OR m.queue = %(queue)s::text
GROUP BY m.queue, m.topic
ORDER BY m.queue, m.topic
