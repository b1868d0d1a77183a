-- Take the advisory locks of a worker that becomes idle. Workers of the same topics share the watch of a queue, and
-- compute its key. All workers share the wake-up lock of a queue: while a session has it, every enqueue notifies.
-- One row per queue: its name, and
--   is_on_watch     Whether this session is on watch. Null if the queue is paused or at its limit: then no lock is tried,
--                   because an enqueue need not notify before the next permit, or before the queue is resumed.
--   wake_up_lock    `own`: this session has it. `other`: the watch of other topics, or the watch on which this session
--                   relies. `free`: no session, because enqueuing transactions share it or because the watch polls.
--   permit_seconds  The seconds until the next permit of a queue at its limit.
SELECT
    q.queue,
    q.is_on_watch,
    CASE
        WHEN q.is_on_watch IS NULL THEN NULL
        WHEN q.is_on_watch AND pg_try_advisory_lock(1885826146, hashtext(q.queue)) THEN 'own'
        -- 1885826146 is the class of the wake-up locks. A share is refused only while a session has the lock, and ends
        -- with this statement.
        WHEN pg_try_advisory_xact_lock_shared(1885826146, hashtext(q.queue)) THEN 'free'
        ELSE 'other'
    END AS wake_up_lock,
    extract(epoch FROM nullif(q.permit_at, 'infinity') - clock_timestamp())::float8 AS permit_seconds
FROM (
    SELECT
        asked.queue,
        permit.at AS permit_at,
        -- The session on watch may take the watch again, because it releases all its locks together.
        CASE WHEN permit.at IS NULL THEN pg_try_advisory_lock(asked.watch_key) END AS is_on_watch
    FROM unnest(%(queues)s::text[], %(watch_keys)s::bigint[]) AS asked(queue, watch_key)
    CROSS JOIN LATERAL (SELECT pgoutbox.next_permit_at(asked.queue) AS at OFFSET 0) AS permit
    -- OFFSET 0 keeps PostgreSQL from computing a column several times.
    OFFSET 0
) AS q
