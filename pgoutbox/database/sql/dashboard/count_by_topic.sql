-- The numbers of unfinished and failed messages by topic, from the newest `cap` of each; and their totals.
WITH unfinished AS MATERIALIZED (
    SELECT m.topic
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('pending', 'sending')
    ORDER BY m.id DESC
    LIMIT %(cap)s::bigint
), failed AS MATERIALIZED (
    SELECT m.topic
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'failed'
    ORDER BY m.id DESC
    LIMIT %(cap)s::bigint
)
SELECT counted.topic, sum(counted.unfinished)::bigint AS unfinished, sum(counted.failed)::bigint AS failed
FROM (
    SELECT w.topic, count(*) AS unfinished, 0 AS failed FROM unfinished AS w GROUP BY w.topic
    UNION ALL
    SELECT f.topic, 0, count(*) FROM failed AS f GROUP BY f.topic
) AS counted
GROUP BY counted.topic
ORDER BY counted.topic
