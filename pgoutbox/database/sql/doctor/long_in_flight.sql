-- Messages that have been in flight for longer than `seconds` with a valid lease, by topic.
SELECT
    m.topic,
    count(*) AS messages,
    min(m.id) AS first_id,
    max(extract(epoch FROM now() - m.claimed_at)::float8) AS longest_seconds
FROM pgoutbox.in_flight_view AS m
WHERE m.lease_expires_at > now()
    AND m.claimed_at < now() - make_interval(secs => %(seconds)s::float8)
GROUP BY m.topic
ORDER BY m.topic
LIMIT 100
