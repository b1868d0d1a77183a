-- Set the ceiling of a queue's rate, or remove it with nulls. Its trigger lowers a rate that is above it. Only the owner of
-- the schema may run this.
INSERT INTO pgoutbox.queue AS q (name, ceiling_count, ceiling_seconds)
VALUES (%(queue)s::text, %(count)s::integer, %(seconds)s::float8)
ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
SET ceiling_count = excluded.ceiling_count,
    ceiling_seconds = excluded.ceiling_seconds
RETURNING q.name
