-- Set the retention rule of a topic and state. A null duration keeps messages without a limit.
INSERT INTO pgoutbox.retention (topic, state, keep)
VALUES (%(topic)s::text, %(state)s::text, make_interval(secs => %(keep_seconds)s::float8))
ON CONFLICT ON CONSTRAINT retention_pkey DO UPDATE SET keep = excluded.keep
RETURNING topic
