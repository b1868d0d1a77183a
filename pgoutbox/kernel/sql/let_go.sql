-- Release all advisory locks of this session, and tell the idle workers of these queues that their watch has ended. Each of
-- them asks for it, and the one that gets it claims once more: messages committed before then do not notify.
SELECT
    pg_advisory_unlock_all(),
    -- Above half of the notification queue all idle workers poll.
    CASE WHEN pg_notification_queue_usage() < 0.5 THEN pg_notify('pgoutbox_idle', q.queue) END
FROM unnest(%(queues)s::text[]) AS q(queue)
