-- Take the advisory locks of a worker that goes to sleep. A queue has one bell: while a session holds it, every enqueue
-- notifies. Workers of the same topics also share two posts, watch and deputy, whose keys they compute.
-- One row per queue: its name, an answer, and for `limited` the seconds until the next permit. The answers:
--   armed      This session is on watch and has the bell: every enqueue notifies.
--   rung       This session is on watch, and the watch of other topics has the bell: every enqueue notifies.
--   producers  This session is on watch, and enqueuing transactions hold the bell: poll again after their commit.
--   deputy     Another session is on watch, and this one is its deputy.
--   polled     As deputy, but the bell is not armed.
--   sleeper    Both posts are taken.
--   limited    The queue is paused or at its limit. An enqueue need not notify before the next permit, or before the
--              queue is resumed.
SELECT
    q.queue,
    CASE
        WHEN q.permit_at IS NOT NULL THEN 'limited'
        -- The session on watch may take the watch again, because it releases all its locks together.
        WHEN NOT pg_try_advisory_lock(q.watch_key)
        THEN CASE
            -- A session must not take the post of a deputy twice, because it releases it separately.
            WHEN CASE WHEN q.is_deputy THEN false ELSE NOT pg_try_advisory_lock(q.deputy_key) END THEN 'sleeper'
            -- 1885826146 is the class of the bells. A shared lock is refused only while a session has the bell. It is
            -- given back at once.
            WHEN NOT pg_try_advisory_lock_shared(1885826146, hashtext(q.queue)) THEN 'deputy'
            WHEN pg_advisory_unlock_shared(1885826146, hashtext(q.queue)) THEN 'polled'
        END
        -- A deputy that gets the watch releases its post. This condition is never true.
        WHEN CASE WHEN q.is_deputy THEN NOT pg_advisory_unlock(q.deputy_key) END THEN NULL
        WHEN pg_try_advisory_lock(1885826146, hashtext(q.queue)) THEN 'armed'
        WHEN NOT pg_try_advisory_lock_shared(1885826146, hashtext(q.queue)) THEN 'rung'
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
