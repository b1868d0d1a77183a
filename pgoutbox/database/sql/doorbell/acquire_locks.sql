-- Take the advisory locks of a worker that becomes idle. A queue has one wake-up lock: while a session has it, every
-- enqueue notifies. Workers of the same topics also share two roles, watch and deputy, whose lock keys they compute.
-- One row per queue: its name, an answer, and for `limited` the seconds until the next permit. The answers:
--   acquired   This session is on watch and has the wake-up lock: every enqueue notifies.
--   notified   This session is on watch, and the watch of other topics has the wake-up lock: every enqueue notifies.
--   producers  This session is on watch, and enqueuing transactions hold the lock: poll again after their commit.
--   deputy     Another session is on watch, and this one is its deputy.
--   polled     As deputy, but no session has the wake-up lock.
--   idle       Both roles are taken.
--   limited    The queue is paused or at its limit. An enqueue need not notify before the next permit, or before the
--              queue is resumed.
SELECT
    q.queue,
    CASE
        WHEN q.permit_at IS NOT NULL THEN 'limited'
        -- The session on watch may take the watch again, because it releases all its locks together.
        WHEN NOT pg_try_advisory_lock(q.watch_key)
        THEN CASE
            -- A session must not take the role of a deputy twice, because it releases it separately.
            WHEN CASE WHEN q.is_deputy THEN false ELSE NOT pg_try_advisory_lock(q.deputy_key) END THEN 'idle'
            -- 1885826146 is the class of the wake-up locks. A shared lock is refused only while a session has the
            -- lock. It is released at once.
            WHEN NOT pg_try_advisory_lock_shared(1885826146, hashtext(q.queue)) THEN 'deputy'
            WHEN pg_advisory_unlock_shared(1885826146, hashtext(q.queue)) THEN 'polled'
        END
        -- A deputy that gets the watch releases its role. This condition is never true.
        WHEN CASE WHEN q.is_deputy THEN NOT pg_advisory_unlock(q.deputy_key) END THEN NULL
        WHEN pg_try_advisory_lock(1885826146, hashtext(q.queue)) THEN 'acquired'
        WHEN NOT pg_try_advisory_lock_shared(1885826146, hashtext(q.queue)) THEN 'notified'
        WHEN pg_advisory_unlock_shared(1885826146, hashtext(q.queue)) THEN 'producers'
    END,
    extract(epoch FROM nullif(q.permit_at, 'infinity') - clock_timestamp())::float8
FROM (
    SELECT
        asked.queue,
        asked.watch_key,
        asked.deputy_key,
        asked.queue = ANY(%(deputy_of)s::text[]) AS is_deputy,
        pgoutbox.next_permit_at(asked.queue) AS permit_at
    FROM unnest(%(queues)s::text[], %(watch_keys)s::bigint[], %(deputy_keys)s::bigint[])
        AS asked(queue, watch_key, deputy_key)
    -- OFFSET 0 keeps PostgreSQL from computing next_permit_at several times.
    OFFSET 0
) AS q
