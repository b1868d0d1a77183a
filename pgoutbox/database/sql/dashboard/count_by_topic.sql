-- The messages in flight and the failed ones by topic, from the newest `cap` of each, and the newest failed one.
SELECT
    held.topic,
    count(*) FILTER (WHERE held.failed_id IS NULL) AS in_flight,
    count(held.failed_id) AS failed,
    max(held.failed_id) AS failed_id
FROM (
    (SELECT v.topic, NULL::bigint AS failed_id FROM pgoutbox.in_flight_view AS v LIMIT %(cap)s::bigint)
    UNION ALL
    (
        SELECT m.topic, m.id FROM pgoutbox.message_view AS m
        WHERE m.state = 'failed' ORDER BY m.id DESC LIMIT %(cap)s::bigint
    )
) AS held
GROUP BY held.topic
