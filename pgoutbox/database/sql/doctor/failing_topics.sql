-- The topics with the most failures, today's and yesterday's number, and the last error of each.
WITH counted AS MATERIALIZED (
    SELECT
        m.topic,
        count(*) AS failed,
        count(*) FILTER (WHERE m.finished_at > now() - interval '1 day') AS today,
        count(*) FILTER (
            WHERE m.finished_at BETWEEN now() - interval '2 days' AND now() - interval '1 day'
        ) AS yesterday,
        (array_agg(m.id ORDER BY m.finished_at DESC))[1] AS last_id
    FROM (
        SELECT held.id, held.topic, held.finished_at
        FROM pgoutbox.message_view AS held
        WHERE held.state = 'failed'
        LIMIT 100000
    ) AS m
    GROUP BY m.topic
    ORDER BY today DESC, m.topic
    LIMIT 20
)
SELECT c.topic, c.failed, c.today, c.yesterday, last.error AS last_error
FROM counted AS c
-- The view redacts an error each time that it is read, so only the reported errors are read.
LEFT JOIN LATERAL (
    SELECT left(f.last_error, 300) AS error
    FROM pgoutbox.message_view AS f
    WHERE f.state = 'failed' AND f.id = c.last_id
    LIMIT 1
) AS last ON true
ORDER BY c.today DESC, c.topic
