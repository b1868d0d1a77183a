-- Remove the retention rule of a topic and state.
DELETE FROM pgoutbox.retention AS r
WHERE r.topic = %(topic)s::text AND r.state = %(state)s::text
RETURNING r.topic
