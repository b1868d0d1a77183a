-- The workers that have reported within three minutes, with their queues and topics.
SELECT v.name, v.queues, v.topics
FROM pgoutbox.worker_view AS v
ORDER BY v.name
LIMIT 1000
