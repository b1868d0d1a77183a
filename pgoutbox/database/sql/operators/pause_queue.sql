-- Pause a queue, for `seconds` or until it is resumed. A second pause keeps the first start and sets the new end.
INSERT INTO pgoutbox.queue AS q (name, paused_at, resume_at)
VALUES (%(queue)s::text, now(), now() + make_interval(secs => %(seconds)s::float8))
ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
SET paused_at = CASE WHEN q.resume_at <= now() THEN now() ELSE coalesce(q.paused_at, now()) END,
    resume_at = excluded.resume_at
RETURNING q.paused_at, q.resume_at
