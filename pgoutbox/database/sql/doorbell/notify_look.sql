-- Tell the other idle workers of the same topics, by the key of their watch, that this one polls these queues now. That
-- poll begins after this statement, so it sees every message that notified before.
SELECT pg_notify('pgoutbox', 'look ' || asked.watch_key || ' ' || asked.queue)
FROM unnest(%(queues)s::text[], %(watch_keys)s::bigint[]) AS asked(queue, watch_key)
WHERE pg_notification_queue_usage() < 0.5
