-- The duration of the last sent attempts, from claim to end, by topic.
SELECT
    m.topic,
    count(*) AS attempts,
    percentile_cont(0.99) WITHIN GROUP (
        ORDER BY extract(epoch FROM m.finished_at - m.claimed_at)::float8
    ) AS p99_seconds
FROM (
    SELECT done.topic, done.finished_at, done.claimed_at
    FROM pgoutbox.message_view AS done
    WHERE done.state = 'sent'
    ORDER BY done.id DESC
    LIMIT 20000
) AS m
WHERE m.finished_at > now() - interval '1 day'
GROUP BY m.topic
HAVING count(*) >= %(attempts)s::bigint
ORDER BY m.topic
LIMIT 100
