-- The age of the oldest attempt in flight, by topic and queue. It reads all attempts in flight by their index: they are
-- not more than the slots and batches of all workers. At most `max_label_values` groups are reported, the oldest first.
SELECT m.topic, m.queue, extract(epoch FROM now() - min(m.claimed_at))::float8 AS seconds
FROM pgoutbox.in_flight_view AS m
GROUP BY m.topic, m.queue
ORDER BY seconds DESC
LIMIT %(max_label_values)s::bigint
