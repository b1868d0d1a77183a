-- Pause a queue, for `seconds` or until it is resumed. A second pause keeps the first start and sets the new end.
WITH paused AS (
    INSERT INTO pgoutbox.queue AS q (name, paused_at, resume_at)
    VALUES (%(queue)s::text, now(), now() + make_interval(secs => %(seconds)s::float8))
    ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
    SET paused_at = CASE WHEN q.resume_at <= now() THEN now() ELSE coalesce(q.paused_at, now()) END,
        resume_at = excluded.resume_at
    RETURNING q.name, q.paused_at, q.resume_at
)
SELECT
    p.paused_at,
    p.resume_at,
    CASE
        -- All idle workers are woken: no session has the wake-up lock of a paused queue. They may wait for a later end,
        -- or for none.
        WHEN p.resume_at IS NOT NULL AND pg_notification_queue_usage() < 0.9
        THEN pg_notify('pgoutbox', 'all ' || p.name)
    END
FROM paused AS p
