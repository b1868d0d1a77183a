-- Those of the queues that have an idle worker: one that is on watch for the same topics, or has the wake-up lock. A
-- worker asks before it releases messages that would wait too long in its memory. With `is_unknown` all queues have
-- one, because the idle workers of a fleet that does not listen hold no locks.
SELECT asked.queue
FROM unnest(%(queues)s::text[], %(watch_keys)s::bigint[]) AS asked(queue, watch_key)
-- A queue with a rate is left out: each claim takes a token, so a released message needs two.
WHERE NOT EXISTS (
        SELECT FROM pgoutbox.queue AS limited WHERE limited.name = asked.queue AND limited.rate_count IS NOT NULL
    )
    AND (
        %(is_unknown)s::boolean
        OR EXISTS (
            -- The lock of a watch is looked up and not tried: if it were taken for a moment, an idle worker that asks for
            -- it then would rely on a watch that does not exist.
            SELECT FROM pg_catalog.pg_locks AS l
            WHERE l.locktype = 'advisory'
                AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
                AND l.classid = ((asked.watch_key >> 32) & 4294967295)::oid
                AND l.objid = (asked.watch_key & 4294967295)::oid
                AND l.objsubid = 1
        )
        OR NOT pg_try_advisory_xact_lock_shared(1885826146, hashtext(asked.queue))
    )
