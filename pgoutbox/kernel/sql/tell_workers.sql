-- Wake the idle workers of these queues, after the commit of messages that this worker has released: others may have slots.
SELECT pg_notify('pgoutbox', 'all ' || told.queue)
FROM unnest(%(queues)s::text[]) AS told(queue)
WHERE pg_notification_queue_usage() < 0.5
