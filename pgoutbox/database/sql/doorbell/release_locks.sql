-- Release all advisory locks of this session, and wake the idle workers that relied on them. Each of them asks for the
-- watch and polls once more: messages committed before a session has the wake-up lock again do not notify.
SELECT
    pg_advisory_unlock_all(),
    -- Above half of the notification queue all idle workers poll.
    CASE WHEN pg_notification_queue_usage() < 0.5 THEN pg_notify('pgoutbox', 'all ' || q.queue) END
FROM unnest(%(queues)s::text[]) AS q(queue)
