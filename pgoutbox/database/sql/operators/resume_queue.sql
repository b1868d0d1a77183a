-- End the pause of a queue. No row: the queue was not paused.
UPDATE pgoutbox.queue AS q
SET paused_at = NULL, resume_at = NULL
WHERE q.name = %(queue)s::text
    AND q.paused_at IS NOT NULL
    -- A pause without an end, null, is also a pause. A pause that has passed its end is not.
    AND (q.resume_at > now()) IS NOT FALSE
RETURNING q.name
