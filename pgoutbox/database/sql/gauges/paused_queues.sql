-- The paused queues, for monitoring.
SELECT q.name
FROM pgoutbox.queue_view AS q
WHERE q.is_paused
ORDER BY q.name
LIMIT %(max_label_values)s::bigint
