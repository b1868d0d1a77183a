-- The messages in flight and the failed ones by topic, from the newest `cap` of each, and the newest failed one.
WITH failed AS MATERIALIZED (
    SELECT m.topic, m.id
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'failed'
    ORDER BY m.id DESC
    LIMIT %(cap)s::bigint
), in_flight AS MATERIALIZED (
    SELECT v.topic
    FROM pgoutbox.in_flight_view AS v
    LIMIT %(cap)s::bigint
)
SELECT counted.topic, sum(counted.in_flight)::bigint, sum(counted.failed)::bigint, max(counted.failed_id)
FROM (
    SELECT v.topic, count(*) AS in_flight, 0 AS failed, NULL::bigint AS failed_id FROM in_flight AS v GROUP BY v.topic
    UNION ALL
    SELECT f.topic, 0, count(*), max(f.id) FROM failed AS f GROUP BY f.topic
) AS counted
GROUP BY counted.topic
