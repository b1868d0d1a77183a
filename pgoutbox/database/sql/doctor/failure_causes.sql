-- The causes for which messages failed within the last `seconds`, the most frequent first: topic, newest error, number of
-- messages; and the numbers of all causes and messages. Only the newest messages are read, because the view redacts
-- each error.
WITH lately AS MATERIALIZED (
    SELECT failed.id, failed.topic, failed.last_error
    FROM pgoutbox.message_view AS failed
    WHERE failed.state = 'failed' AND failed.finished_at > now() - make_interval(secs => %(seconds)s::float8)
    ORDER BY failed.finished_at DESC
    LIMIT 10000
), causes AS (
    SELECT
        m.topic,
        \ir ../dashboard/_folded_error.sql
        AS cause,
        count(*) AS messages,
        max(m.id) AS newest_id
    FROM lately AS m
    GROUP BY 1, 2
)
SELECT
    c.topic,
    c.messages,
    left(newest.last_error, 300) AS error,
    count(*) OVER () AS cause_count,
    (sum(c.messages) OVER ())::bigint AS message_count
FROM causes AS c
JOIN lately AS newest ON newest.id = c.newest_id
ORDER BY c.messages DESC, c.topic, c.cause
LIMIT 10
