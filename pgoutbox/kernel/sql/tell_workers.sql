-- Wake the idle workers of these queues, after the commit of messages that others may deliver: this worker has released them
-- because it has no free slot, or cannot read them.
SELECT pg_notify('pgoutbox_idle', 'all ' || told.queue)
FROM unnest(%(queues)s::text[]) AS told(queue)
WHERE pg_notification_queue_usage() < 0.5
