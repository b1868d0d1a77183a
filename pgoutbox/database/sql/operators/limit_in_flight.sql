-- Limit the number of messages of a queue in flight, or remove the limit with null.
INSERT INTO pgoutbox.queue AS q (name, max_in_flight)
VALUES (%(queue)s::text, %(max_in_flight)s::integer)
ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE SET max_in_flight = excluded.max_in_flight
RETURNING q.name
