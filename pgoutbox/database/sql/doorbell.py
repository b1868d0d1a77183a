"""The bell that a sleeping worker has, and its listener."""

from typing import Final, LiteralString

LISTEN: Final[LiteralString] = "LISTEN pgoutbox"

UNLISTEN: Final[LiteralString] = "UNLISTEN pgoutbox"

# A queue has one bell. Workers of the same topics also share two posts, watch and deputy, whose keys they compute.
# Answers for each queue:
#   armed      This session is on watch and has the bell: every enqueue notifies.
#   rung       This session is on watch, and the watch of other topics has the bell: every enqueue notifies.
#   producers  This session is on watch, and enqueuing transactions hold the bell: look again until they have committed.
#   deputy     Another session is on watch, and this one is its deputy.
#   polled     As deputy, but the bell is not armed.
#   sleeper    Both posts are taken.
#   limited    The queue is paused or at its limit. An enqueue need not notify before the next permit, in the returned
# seconds, or before the queue is resumed. The session on watch may take the watch again, because it releases all its
# locks together. It must not take a bell or the post of a deputy twice, because it releases these separately.
ARM: Final[LiteralString] = """
SELECT
    q.queue,
    CASE
        WHEN q.permit_at IS NOT NULL THEN 'limited'
        WHEN NOT pg_try_advisory_lock(q.watch_key)
        THEN CASE
            WHEN CASE WHEN q.is_deputy THEN false ELSE NOT pg_try_advisory_lock(q.deputy_key) END THEN 'sleeper'
            WHEN NOT pg_try_advisory_lock_shared(1885826146, hashtext(q.queue)) THEN 'deputy'
            WHEN pg_advisory_unlock_shared(1885826146, hashtext(q.queue)) THEN 'polled'
        END
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
    OFFSET 0
) AS q
"""

# Other sleepers rely on a watch that ends here. Each of them is woken to ask for it and to look once more: messages
# committed before a session has the bell again do not notify. Above half of the notification queue all sleepers poll.
DISARM: Final[LiteralString] = """
SELECT
    pg_advisory_unlock_all(),
    CASE WHEN pg_notification_queue_usage() < 0.5 THEN pg_notify('pgoutbox', 'all ' || q.queue) END
FROM unnest(%(queues)s::text[]) AS q(queue)
"""

# The watch of other topics relies on this bell and takes it over. The deputy looks periodically while no session has
# it.
LOWER: Final[LiteralString] = """
SELECT
    pg_advisory_unlock(1885826146, hashtext(q.queue)),
    CASE WHEN pg_notification_queue_usage() < 0.5 THEN pg_notify('pgoutbox', 'lowered ' || q.queue) END
FROM unnest(%(queues)s::text[]) AS q(queue)
"""

# Reading the usage of the notification queue also moves its tail. Without this the tail may not move for a long time.
PROBE: Final[LiteralString] = """
SELECT
    EXISTS (SELECT FROM pg_listening_channels() AS c(name) WHERE c.name = 'pgoutbox') AS is_listening,
    pg_notification_queue_usage()::float8 AS notify_usage
"""

# The queues with an idle worker, which is on watch for the same topics or has the bell. With `is_unknown` all queues,
# because the idle workers of a fleet that does not listen hold no locks. A queue with a rate is left out: each claim
# takes a token, so a released message needs two. The lock of a watch is looked up and not tried: if it were taken for a
# moment, a sleeper that asks for it meanwhile would rely on a watch that does not exist.
IDLE_QUEUES: Final[LiteralString] = """
SELECT asked.queue
FROM unnest(%(queues)s::text[], %(watch_keys)s::bigint[]) AS asked(queue, watch_key)
WHERE NOT EXISTS (
        SELECT FROM pgoutbox.queue AS limited WHERE limited.name = asked.queue AND limited.rate_count IS NOT NULL
    )
    AND (
        %(is_unknown)s::boolean
        OR EXISTS (
            SELECT FROM pg_catalog.pg_locks AS l
            WHERE l.locktype = 'advisory'
                AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
                AND l.classid = ((asked.watch_key >> 32) & 4294967295)::oid
                AND l.objid = (asked.watch_key & 4294967295)::oid
                AND l.objsubid = 1
        )
        OR NOT pg_try_advisory_xact_lock_shared(1885826146, hashtext(asked.queue))
    )
"""

# Unlike an enqueue, a worker rings even if no session has the bell, and wakes all sleepers of the queue.
RING: Final[LiteralString] = """
SELECT pg_notify('pgoutbox', 'all ' || q.queue)
FROM unnest(%(queues)s::text[]) AS q(queue)
WHERE pg_notification_queue_usage() < 0.5
"""
