-- Release the wake-up locks of these queues. The watch of other topics relies on this lock and takes it over. While no
-- session has the lock, the other idle workers look now and then.
SELECT
    pg_advisory_unlock(1885826146, hashtext(q.queue)),
    CASE WHEN pg_notification_queue_usage() < 0.5 THEN pg_notify('pgoutbox', 'released ' || q.queue) END
FROM unnest(%(queues)s::text[]) AS q(queue)
