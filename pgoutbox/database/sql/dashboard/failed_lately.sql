-- Failed messages by topic and minute, from a sample of the newest ids: most messages that fail now were enqueued
-- lately.
SELECT
    failed.topic,
    date_bin('1 minute', failed.finished_at, 'epoch') AS minute,
    count(*) AS messages
FROM (
    SELECT m.topic, m.finished_at
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'failed'
    ORDER BY m.id DESC
    LIMIT %(cap)s::bigint
) AS failed
GROUP BY 1, 2
