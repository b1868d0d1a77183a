-- The paused topics.
CREATE VIEW pgoutbox.topic_pause_view AS
SELECT
    p.topic,
    p.paused_at,
    p.resume_at
FROM pgoutbox.topic_pause AS p
-- A pause without an end, null, is also a pause. A pause that has passed its end is not.
WHERE (p.resume_at > now()) IS NOT FALSE;
