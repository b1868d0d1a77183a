-- Limit the number of messages of a queue in flight, or remove the limit with null.
WITH limited AS (
    INSERT INTO pgoutbox.queue AS q (name, max_in_flight)
    VALUES (%(queue)s::text, %(max_in_flight)s::integer)
    ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE SET max_in_flight = excluded.max_in_flight
    RETURNING q.name
)
-- All idle workers are woken, because they may wait for a later permit, or for none.
SELECT l.name, CASE WHEN pg_notification_queue_usage() < 0.9 THEN pg_notify('pgoutbox', 'all ' || l.name) END
FROM limited AS l
