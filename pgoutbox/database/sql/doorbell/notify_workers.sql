-- Wake all idle workers of these queues. Unlike an enqueue, this notifies even if no session has the wake-up lock.
SELECT pg_notify('pgoutbox', 'all ' || q.queue)
FROM unnest(%(queues)s::text[]) AS q(queue)
WHERE pg_notification_queue_usage() < 0.5
