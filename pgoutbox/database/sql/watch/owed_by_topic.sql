-- Open and failed messages by queue and topic, for live displays. Reads only live and failed messages, so that the
-- number of sent messages does not matter.
SELECT
    m.queue,
    m.topic,
    count(*) FILTER (WHERE m.state = 'pending' AND m.available_at <= now()) AS due,
    count(*) FILTER (WHERE m.state = 'pending' AND m.available_at > now()) AS scheduled,
    -- Attempts without snoozes, releases and postponements, which raise max_attempts.
    count(*) FILTER (WHERE m.state = 'pending' AND m.attempt_count + m.attempt_budget > m.max_attempts) AS retries,
    count(*) FILTER (WHERE m.state = 'sending') AS sending,
    count(*) FILTER (WHERE m.state = 'failed') AS failed,
    extract(
        epoch FROM now() - min(m.available_at) FILTER (WHERE m.state = 'pending' AND m.available_at <= now())
    )::float8 AS oldest_due_seconds
FROM pgoutbox.message_view AS m
WHERE m.state IN ('pending', 'sending', 'failed')
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text)
GROUP BY m.queue, m.topic
