-- The number of pending, in-flight and failed messages, by queue and topic. At most `max_label_values` queues and topics are
-- reported separately, those with the most messages; all others have the name `other`.
-- It reads all rows without a LIMIT, because a sample is not a count. limit_gauges.sql bounds its time, and callers run
-- it less often the longer it takes. No alert about late messages reads it. Finished messages are in another partition.
WITH counted AS MATERIALIZED (
    SELECT
        m.queue,
        m.topic,
        count(*) AS total,
        count(*) FILTER (WHERE m.state = 'pending' AND m.available_at <= now()) AS due,
        count(*) FILTER (WHERE m.state = 'pending' AND m.available_at > now()) AS scheduled,
        count(*) FILTER (WHERE m.state = 'sending') AS sending,
        count(*) FILTER (WHERE m.state = 'failed') AS failed
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('pending', 'sending', 'failed')
    GROUP BY m.queue, m.topic
), ranked_topic AS (
    SELECT c.topic, row_number() OVER (ORDER BY sum(c.total) DESC, c.topic) AS place
    FROM counted AS c
    GROUP BY c.topic
), ranked_queue AS (
    SELECT c.queue, row_number() OVER (ORDER BY sum(c.total) DESC, c.queue) AS place
    FROM counted AS c
    GROUP BY c.queue
)
SELECT
    CASE WHEN t.place <= %(max_label_values)s::bigint THEN c.topic ELSE %(other)s::text END AS topic,
    CASE WHEN q.place <= %(max_label_values)s::bigint THEN c.queue ELSE %(other)s::text END AS queue,
    s.state,
    sum(s.messages)::bigint AS messages
FROM counted AS c
JOIN ranked_topic AS t ON t.topic = c.topic
JOIN ranked_queue AS q ON q.queue = c.queue
CROSS JOIN LATERAL (
    VALUES ('due', c.due), ('scheduled', c.scheduled), ('sending', c.sending), ('failed', c.failed)
) AS s(state, messages)
GROUP BY 1, 2, 3
ORDER BY 1, 2, 3
