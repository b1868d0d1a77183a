-- The retention rules; the rules for all topics are last.
SELECT r.topic, r.state, r.keep
FROM pgoutbox.retention_view AS r
ORDER BY r.topic = '*', r.topic, r.state
