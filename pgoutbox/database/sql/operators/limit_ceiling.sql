-- Set the ceiling of a queue's rate, or remove it with nulls. Its trigger lowers a rate that is above it. Only the owner of
-- the schema may run this.
WITH limited AS (
    INSERT INTO pgoutbox.queue AS q (name, ceiling_count, ceiling_seconds)
    VALUES (%(queue)s::text, %(count)s::integer, %(seconds)s::float8)
    ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
    SET ceiling_count = excluded.ceiling_count,
        ceiling_seconds = excluded.ceiling_seconds
    RETURNING q.name
)
-- All idle workers are woken, because they may wait for a later permit, or for none.
SELECT l.name, CASE WHEN pg_notification_queue_usage() < 0.9 THEN pg_notify('pgoutbox', 'all ' || l.name) END
FROM limited AS l
