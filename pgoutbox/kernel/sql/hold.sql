-- Take the advisory locks of a worker that becomes idle, without waiting. Workers of the same topics share the watch of a
-- queue, and compute its key. All workers share the wake-up lock of a queue: while a session has it, every enqueue notifies.
-- One row per queue: its name, the seconds until its next permit, the usage of the notification queue, and
--   limited    Paused or at its limit: no lock is tried, because an enqueue need not notify before the next permit.
--   relies     Another session of the same topics is on watch.
--   holds      This session is on watch, and has the wake-up lock.
--   producers  It is on watch, but enqueuing transactions share the wake-up lock, and will not notify.
--   watch      It is on watch, and the watch of other topics has the wake-up lock.
SELECT
    q.queue,
    CASE
        WHEN q.is_on_watch IS NULL THEN 'limited'
        WHEN NOT q.is_on_watch THEN 'relies'
        -- 1885826146 is the class of the wake-up locks, see _notify_workers.
        WHEN pg_try_advisory_lock(1885826146, hashtext(q.queue)) THEN 'holds'
        -- A share is refused only while a session has the lock. This one ends with the transaction of the question,
        -- which also runs next_due.sql: until then another watch sees it as that of a producer, and asks again.
        WHEN pg_try_advisory_xact_lock_shared(1885826146, hashtext(q.queue)) THEN 'producers'
        ELSE 'watch'
    END AS standing,
    extract(epoch FROM nullif(q.permit_at, 'infinity') - clock_timestamp())::float8 AS permit_seconds,
    pg_notification_queue_usage()::float8 AS notify_usage
FROM (
    SELECT
        asked.queue,
        permit.at AS permit_at,
        -- A session may take its watch again, because it releases all its locks together.
        CASE WHEN permit.at IS NULL THEN pg_try_advisory_lock(asked.watch_key) END AS is_on_watch
    FROM unnest(%(queues)s::text[], %(watch_keys)s::bigint[]) AS asked(queue, watch_key)
    CROSS JOIN LATERAL (SELECT pgoutbox.next_permit_at(asked.queue) AS at OFFSET 0) AS permit
    -- OFFSET 0 keeps PostgreSQL from computing a column several times.
    OFFSET 0
) AS q
