-- End the pause of a queue. No row: the queue was not paused.
WITH resumed AS (
    UPDATE pgoutbox.queue AS q
    SET paused_at = NULL, resume_at = NULL
    WHERE q.name = %(queue)s::text
        AND q.paused_at IS NOT NULL
        -- A pause without an end, null, is also a pause. A pause that has passed its end is not.
        AND (q.resume_at > now()) IS NOT FALSE
    RETURNING q.name
)
-- All idle workers are woken: no session has the wake-up lock of a paused queue.
SELECT r.name, CASE WHEN pg_notification_queue_usage() < 0.9 THEN pg_notify('pgoutbox', 'all ' || r.name) END
FROM resumed AS r
