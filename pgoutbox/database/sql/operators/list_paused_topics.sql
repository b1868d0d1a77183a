-- The paused topics.
SELECT p.topic, p.paused_at, p.resume_at
FROM pgoutbox.topic_pause_view AS p
ORDER BY p.topic
