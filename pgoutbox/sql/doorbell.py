"""The bell that a sleeping worker has, and its listener."""

from typing import Final, LiteralString

LISTEN: Final[LiteralString] = "LISTEN pgoutbox"

UNLISTEN: Final[LiteralString] = "UNLISTEN pgoutbox"

# One answer per queue: armed; sleeper, when another worker has the bell; producers, when enqueuing transactions hold
# it, and the worker must look again until they have committed. A queue that is paused or at its limit is not armed:
# what is enqueued there need not ring before the next permit, in so many seconds, or before somebody resumes the queue.
ARM: Final[LiteralString] = """
SELECT
    q.queue,
    CASE
        WHEN q.permit_at IS NOT NULL THEN 'limited'
        WHEN pg_try_advisory_lock(1885826146, hashtext(q.queue)) THEN 'armed'
        WHEN NOT pg_try_advisory_lock_shared(1885826146, hashtext(q.queue)) THEN 'sleeper'
        WHEN pg_advisory_unlock_shared(1885826146, hashtext(q.queue)) THEN 'producers'
    END,
    extract(epoch FROM nullif(q.permit_at, 'infinity') - clock_timestamp())::float8
FROM (
    SELECT asked.queue, pgoutbox.next_permit_at(asked.queue) AS permit_at
    FROM unnest(%(queues)s::text[]) AS asked(queue)
    OFFSET 0
) AS q
"""

# Other sleepers trust in a bell that is given up here. Each of them is woken to ask for it and to look once more: what
# is committed before somebody has the bell again does not ring. Above half of the notification queue all sleepers poll.
DISARM: Final[LiteralString] = """
SELECT
    pg_advisory_unlock(1885826146, hashtext(q.queue)),
    CASE WHEN pg_notification_queue_usage() < 0.5 THEN pg_notify('pgoutbox', q.queue) END
FROM unnest(%(queues)s::text[]) AS q(queue)
"""

# To ask how full the notification queue is also moves its tail, which nobody else may do for long.
PROBE: Final[LiteralString] = """
SELECT
    EXISTS (SELECT FROM pg_listening_channels() AS c(name) WHERE c.name = 'pgoutbox') AS is_listening,
    pg_notification_queue_usage()::float8 AS notify_usage
"""

# Which of these queues have an idle worker: a sleeping worker holds the bell. With `is_unknown` all of them, because
# the idle workers of a fleet that does not listen hold none. A queue with a rate is left out: each claim takes a token,
# so a message that goes back needs two.
IDLE_QUEUES: Final[LiteralString] = """
SELECT asked.queue
FROM unnest(%(queues)s::text[]) AS asked(queue)
WHERE NOT EXISTS (
        SELECT FROM pgoutbox.queue AS limited WHERE limited.name = asked.queue AND limited.rate_count IS NOT NULL
    )
    AND (%(is_unknown)s::boolean OR NOT pg_try_advisory_xact_lock_shared(1885826146, hashtext(asked.queue)))
"""

# Unlike an enqueue, a worker rings whether or not somebody has the bell: the sleepers it means may have none.
RING: Final[LiteralString] = """
SELECT pg_notify('pgoutbox', q.queue)
FROM unnest(%(queues)s::text[]) AS q(queue)
WHERE pg_notification_queue_usage() < 0.5
"""
