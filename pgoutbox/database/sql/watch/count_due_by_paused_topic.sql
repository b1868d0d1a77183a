-- The due messages of the paused ones of these topics in these queues, at most 10,000 of each topic. A run counts what a pause
-- has kept it from delivering.
SELECT p.topic, due.messages
FROM pgoutbox.topic_pause_view AS p
CROSS JOIN LATERAL (
    SELECT count(*) AS messages
    FROM (
        SELECT
        FROM pgoutbox.message_live AS m
        WHERE m.queue = ANY (%(queues)s::text[]) AND m.topic = p.topic AND m.state = 'pending' AND m.available_at <= now()
        LIMIT 10000
    ) AS found
) AS due
WHERE p.topic = ANY (%(topics)s::text[]) AND due.messages > 0
ORDER BY p.topic
