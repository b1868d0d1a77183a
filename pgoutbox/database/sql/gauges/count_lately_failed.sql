-- The messages that failed within the last hour and are still failed, by topic and queue; at most `max_label_values`
-- groups, those with the most messages. Unlike a worker's counter, it is exact whichever workers have died since.
SELECT m.topic, m.queue, count(*) AS messages
FROM pgoutbox.message_view AS m
WHERE m.state = 'failed' AND m.finished_at > now() - interval '1 hour'
GROUP BY m.topic, m.queue
ORDER BY messages DESC
LIMIT %(max_label_values)s::bigint
