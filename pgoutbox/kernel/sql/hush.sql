-- Release the wake-up locks of these queues, which this session has: their producers notify no longer. It stays on watch,
-- and tells the watches of other topics, which relied on its lock.
SELECT
    pg_advisory_unlock(1885826146, hashtext(q.queue)),
    CASE WHEN pg_notification_queue_usage() < 0.5 THEN pg_notify('pgoutbox_idle', 'polls ' || q.queue) END
FROM unnest(%(queues)s::text[]) AS q(queue)
