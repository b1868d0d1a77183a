-- Pending messages, by topic and scheme of the destination.
SELECT
    m.topic,
    CASE WHEN strpos(m.destination, ':') > 0 THEN lower(split_part(m.destination, ':', 1)) END AS scheme,
    count(*) AS messages
FROM (
    SELECT live.topic, live.destination
    FROM pgoutbox.message_view AS live
    WHERE live.state = 'pending'
    LIMIT 100000
) AS m
GROUP BY 1, 2
ORDER BY 1, 2
LIMIT 1000
