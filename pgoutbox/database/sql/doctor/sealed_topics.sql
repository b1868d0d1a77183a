-- sealed_payloads.sql for roles that may not read payloads: the views only show that a payload is encrypted.
SELECT m.topic, count(*) AS messages
FROM (
    SELECT live.topic, live.payload
    FROM pgoutbox.message_view AS live
    WHERE live.state = 'pending'
    LIMIT 1000
) AS m
WHERE jsonb_typeof(m.payload) = 'object' AND m.payload ? %(member)s::text
GROUP BY m.topic
ORDER BY m.topic
LIMIT 100
