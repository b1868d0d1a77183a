"""The statements of the dashboard. Every statement is bounded: counts end at a cap, searches read a limited number of
rows and can be continued, and expensive counts are estimated from statistics.

They read only the views, which operators and viewers may read. A condition on the state selects the partition, as for
the table. Redacted columns are only read for few rows, or for a search in them.
"""

from typing import Final, LiteralString

from pgoutbox.database.sql.operators import LISTED, MATCHES

# Every statement here reads an index from one end, and stops at its limit. A bitmap would read all matching rows before
# the limit applies. A sequential scan would only seem cheaper because of outdated statistics, and its estimated cost
# would start JIT compilation or parallel workers, which takes longer than the statement.
PREPARE_PAGE: Final[LiteralString] = """
SELECT
    set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('max_parallel_workers_per_gather', '0', true),
    set_config('jit', 'off', true)
"""

# For indexes that need a bitmap: block ranges, and the messages of an act.
ALLOW_BITMAPS: Final[LiteralString] = "SELECT set_config('enable_bitmapscan', 'on', true)"

# The queues with live messages, found by leaps along the indexes, and queues with limits or a pause; or the given
# queue. Due messages are counted lane by lane up to a cap. The first message of each lane is its oldest.
LIVE_QUEUES: Final[LiteralString] = """
WITH RECURSIVE fresh(queue) AS (
    (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.state = 'pending' AND m.attempt_count = 0 AND m.ordering_key IS NULL
        ORDER BY m.queue
        LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.state = 'pending' AND m.attempt_count = 0 AND m.ordering_key IS NULL AND m.queue > f.queue
        ORDER BY m.queue
        LIMIT 1
    )
    FROM fresh AS f
    WHERE f.queue IS NOT NULL
), retried(queue) AS (
    (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.attempt_count > 0 AND m.state = 'pending' AND m.ordering_key IS NULL
        ORDER BY m.queue
        LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.attempt_count > 0 AND m.state = 'pending' AND m.ordering_key IS NULL AND m.queue > r.queue
        ORDER BY m.queue
        LIMIT 1
    )
    FROM retried AS r
    WHERE r.queue IS NOT NULL
), ordered(queue) AS (
    (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.ordering_key IS NOT NULL AND m.state = 'pending'
        ORDER BY m.queue
        LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.ordering_key IS NOT NULL AND m.state = 'pending' AND m.queue > o.queue
        ORDER BY m.queue
        LIMIT 1
    )
    FROM ordered AS o
    WHERE o.queue IS NOT NULL
), leased(queue) AS (
    (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.state = 'sending' AND m.lease_expires_at IS NOT NULL
        ORDER BY m.queue
        LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.state = 'sending' AND m.lease_expires_at IS NOT NULL AND m.queue > l.queue
        ORDER BY m.queue
        LIMIT 1
    )
    FROM leased AS l
    WHERE l.queue IS NOT NULL
), named AS (
    SELECT asked.queue
    FROM (VALUES (%(queue)s::text)) AS asked(queue)
    WHERE asked.queue IS NOT NULL
    UNION ALL
    SELECT queue
    FROM (
        (SELECT f.queue FROM fresh AS f LIMIT %(queues)s::bigint)
        UNION
        (SELECT r.queue FROM retried AS r LIMIT %(queues)s::bigint)
        UNION
        (SELECT o.queue FROM ordered AS o LIMIT %(queues)s::bigint)
        UNION
        (SELECT l.queue FROM leased AS l LIMIT %(queues)s::bigint)
        UNION
        (SELECT q.name FROM pgoutbox.queue_view AS q ORDER BY q.name LIMIT %(queues)s::bigint)
    ) AS found
    WHERE queue IS NOT NULL AND %(queue)s::text IS NULL
    ORDER BY queue
    LIMIT %(queues)s::bigint
)
SELECT
    n.queue,
    (
        SELECT count(*)
        FROM (
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count = 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count > 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.ordering_key IS NOT NULL
                    AND m.state = 'pending'
                    AND m.available_at <= now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
        ) AS due
    ) AS due,
    (
        SELECT count(*)
        FROM (
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count = 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at > now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count > 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at > now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.ordering_key IS NOT NULL
                    AND m.state = 'pending'
                    AND m.available_at > now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
        ) AS scheduled
    ) AS scheduled,
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.message_view AS m
            WHERE m.queue = n.queue AND m.state = 'sending' AND m.lease_expires_at > now()
            LIMIT %(cap)s::bigint
        ) AS held
    ) AS sending,
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.message_view AS m
            WHERE m.queue = n.queue AND m.state = 'sending' AND m.lease_expires_at <= now()
            LIMIT %(cap)s::bigint
        ) AS lapsed
    ) AS lapsed,
    (
        SELECT min(first.available_at)
        FROM (
            (
                SELECT m.available_at
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count = 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                ORDER BY m.available_at
                LIMIT 1
            )
            UNION ALL
            (
                SELECT m.available_at
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count > 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                ORDER BY m.available_at
                LIMIT 1
            )
            UNION ALL
            (
                SELECT m.available_at
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
                ORDER BY m.available_at
                LIMIT 1
            )
        ) AS first
    ) AS next_due_at,
    CASE WHEN q.is_paused THEN q.paused_at END AS paused_at,
    q.resume_at,
    q.rate_count,
    q.rate_seconds,
    q.burst,
    q.tokens,
    q.max_in_flight
FROM named AS n
LEFT JOIN pgoutbox.queue_view AS q ON q.name = n.queue
ORDER BY n.queue
"""

# The workers that hold leases. The database does not know a worker without a lease.
LEASE_HOLDERS: Final[LiteralString] = """
SELECT
    held.worker,
    count(*) AS held,
    count(*) FILTER (WHERE held.lease_expires_at <= now()) AS lapsed,
    min(held.claimed_at) AS oldest_claim_at,
    max(held.lease_expires_at) AS last_lease_at,
    (array_agg(DISTINCT held.queue ORDER BY held.queue))[1:10] AS queues
FROM (
    SELECT m.worker, m.queue, m.claimed_at, m.lease_expires_at
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'sending' AND m.lease_expires_at IS NOT NULL
    LIMIT %(cap)s::bigint
) AS held
GROUP BY held.worker
ORDER BY held.worker
LIMIT 200
"""

COUNT_DONE: Final[LiteralString] = """
SELECT done.state, count(*)
FROM (
    SELECT m.state
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('sent', 'skipped', 'cancelled')
    LIMIT %(cap)s::bigint
) AS done
GROUP BY done.state
"""

COUNT_OPEN: Final[LiteralString] = """
SELECT
    (
        SELECT count(*)
        FROM (
            SELECT FROM pgoutbox.message_view AS m WHERE m.state = 'pending' LIMIT %(cap)s::bigint
        ) AS pending
    ) AS pending,
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.message_view AS m
            WHERE m.state = 'sending' AND m.lease_expires_at IS NOT NULL
            LIMIT %(cap)s::bigint
        ) AS sending
    ) AS sending,
    (
        SELECT count(*)
        FROM (SELECT FROM pgoutbox.message_view AS m WHERE m.state = 'failed' LIMIT %(cap)s::bigint) AS failed
    ) AS failed
"""

# As of the last VACUUM or ANALYZE of each partition. No answer for a partition that never had one.
ESTIMATE_DONE: Final[LiteralString] = "SELECT e.state, e.messages FROM pgoutbox.done_estimate() AS e"

LIST_BREAKERS: Final[LiteralString] = """
SELECT
    b.key,
    b.opened_at,
    b.retry_at,
    b.probe_until,
    b.cooldown_seconds,
    b.worker,
    b.last_error
FROM pgoutbox.breaker_view AS b
ORDER BY b.opened_at DESC
LIMIT 100
"""

# Finished messages by minute, read from block ranges. The latency of a sent message counts from its due time, or from
# its enqueue if it was tried again and the due time is no longer known. Its buckets grow by a twelfth of a power of
# two.
FINISHED_BY_MINUTE: Final[LiteralString] = """
SELECT
    done.minute,
    done.state,
    done.bucket,
    count(*) AS messages
FROM (
    SELECT
        date_bin('1 minute', m.finished_at, 'epoch') AS minute,
        m.state,
        CASE
            WHEN m.state = 'sent' THEN floor(
                12 / ln(2::float8) * ln(
                    greatest(
                        0.0001,
                        date_part(
                            'epoch',
                            m.finished_at - CASE WHEN m.attempt_count = 1 THEN m.available_at ELSE m.created_at END
                        )
                    )
                )
            )::integer
        END AS bucket
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('sent', 'skipped', 'cancelled')
        AND m.finished_at >= %(from)s::timestamptz
        AND m.finished_at < %(to)s::timestamptz
) AS done
GROUP BY done.minute, done.state, done.bucket
"""

# A sample of the newest ids: most messages that fail now were enqueued lately.
FAILED_LATELY: Final[LiteralString] = """
SELECT
    failed.topic,
    date_bin('1 minute', failed.finished_at, 'epoch') AS minute,
    count(*) AS messages
FROM (
    SELECT m.topic, m.finished_at
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'failed'
    ORDER BY m.id DESC
    LIMIT %(cap)s::bigint
) AS failed
GROUP BY 1, 2
"""

# Errors that differ only in numbers become equal: digits are replaced, except in status codes such as 404 or 550.
_FOLDED_ERROR: Final[LiteralString] = (
    r"regexp_replace(left(coalesce(m.last_error, ''), 200), '(?<!\d)(?![45]\d\d(?!\d))\d+', '#', 'g')"
)
_ERROR_GROUP: Final[LiteralString] = (
    r"left(encode(sha256(convert_to(m.topic || E'\n' || " + _FOLDED_ERROR + ", 'UTF8')), 'hex'), 32)"
)

FAILED_GROUPS: Final[LiteralString] = (
    """
SELECT
    grouped.topic,
    grouped.error,
    left(encode(sha256(convert_to(grouped.topic || E'\\n' || grouped.error, 'UTF8')), 'hex'), 32) AS error_group,
    grouped.messages,
    grouped.first_at,
    grouped.last_at,
    grouped.newest_id
FROM (
    SELECT
        m.topic,
        """  # noqa: S608
    + _FOLDED_ERROR
    + """ AS error,
        count(*) AS messages,
        min(m.finished_at) AS first_at,
        max(m.finished_at) AS last_at,
        max(m.id) AS newest_id
    FROM (
        SELECT newest.id, newest.topic, newest.last_error, newest.finished_at
        FROM pgoutbox.message_view AS newest
        WHERE newest.state = 'failed'
        ORDER BY newest.id DESC
        LIMIT %(cap)s::bigint
    ) AS m
    GROUP BY 1, 2
) AS grouped
ORDER BY grouped.messages DESC, grouped.topic, grouped.error
LIMIT %(limit)s::bigint
"""
)

_MATCHES_TOO: Final[LiteralString] = (
    MATCHES
    + """    AND (
        %(error_group)s::text IS NULL
        OR """
    + _ERROR_GROUP
    + """ = %(error_group)s::text
    )
"""
)

# A filter with few matches must not read millions of rows: the inner limit applies to the rows read. The inner query
# has only the conditions that select whole partitions; with others its limit would not bound the rows read.
_NEAR_BEFORE: Final[LiteralString] = """
    SELECT near.*
    FROM pgoutbox.message_view AS near
    WHERE (%(partition_states)s::text[] IS NULL OR near.state = ANY (%(partition_states)s::text[]))
        AND (%(before_id)s::bigint IS NULL OR near.id < %(before_id)s::bigint)
        AND (%(not_below_id)s::bigint IS NULL OR near.id >= %(not_below_id)s::bigint)
    ORDER BY near.id DESC
    LIMIT %(rows)s::bigint
"""

# The view redacts the columns of a list. A page has few of the rows read, so only these are read again through the
# view.
_LIST_FOUND_OF: Final[LiteralString] = (
    LISTED  # noqa: S608
    + """FROM (
    SELECT m.id, m.state
    FROM ("""
)
_THAT_MATCH: Final[LiteralString] = (
    """    ) AS m
    WHERE """  # noqa: S608
    + _MATCHES_TOO
    + """    ORDER BY m.id DESC
    LIMIT %(limit)s::bigint
) AS found
CROSS JOIN LATERAL (
    SELECT listed.*
    FROM pgoutbox.message_view AS listed
    WHERE listed.id = found.id AND listed.state = found.state
    LIMIT 1
) AS m
ORDER BY m.id DESC
"""
)

SEARCH_MESSAGES: Final[LiteralString] = _LIST_FOUND_OF + _NEAR_BEFORE + _THAT_MATCH

# The number of matches, and the number of rows read.
COUNT_SEARCHED: Final[LiteralString] = (
    """
SELECT count(*) FILTER (
    WHERE """
    + _MATCHES_TOO
    + """), count(*)
FROM ("""
    + _NEAR_BEFORE
    + """) AS m
"""
)

# The end of a search that found less than a page; no answer if it has read all rows.
SEARCHED: Final[LiteralString] = """
SELECT near.id
FROM pgoutbox.message_view AS near
WHERE (%(partition_states)s::text[] IS NULL OR near.state = ANY (%(partition_states)s::text[]))
    AND (%(before_id)s::bigint IS NULL OR near.id < %(before_id)s::bigint)
    AND (%(not_below_id)s::bigint IS NULL OR near.id >= %(not_below_id)s::bigint)
ORDER BY near.id DESC
OFFSET %(rows)s::bigint - 1
LIMIT 1
"""

# Few messages have this state, and they have their own index.
_SENDING_BEFORE: Final[LiteralString] = """
    SELECT held.*
    FROM pgoutbox.message_view AS held
    WHERE held.state = 'sending'
        AND held.lease_expires_at IS NOT NULL
        AND (%(before_id)s::bigint IS NULL OR held.id < %(before_id)s::bigint)
        AND (%(not_below_id)s::bigint IS NULL OR held.id >= %(not_below_id)s::bigint)
    LIMIT %(rows)s::bigint
"""

SEARCH_SENDING: Final[LiteralString] = _LIST_FOUND_OF + _SENDING_BEFORE + _THAT_MATCH

# For a bulk: from the oldest message on, a limited number of rows at a time, up to the newest message at its start.
SEARCH_AHEAD: Final[LiteralString] = (
    """
SELECT
    array_agg(looked_at.id ORDER BY looked_at.id) FILTER (WHERE looked_at.matches) AS ids,
    array_agg(looked_at.attempt_count ORDER BY looked_at.id) FILTER (WHERE looked_at.matches) AS attempt_counts,
    max(looked_at.id) AS last_id,
    count(*) AS row_count
FROM (
    SELECT
        m.id,
        m.attempt_count,
        """  # noqa: S608
    + _MATCHES_TOO
    + """ AS matches
    FROM (
        SELECT near.*
        FROM pgoutbox.message_view AS near
        WHERE (%(partition_states)s::text[] IS NULL OR near.state = ANY (%(partition_states)s::text[]))
            AND near.id > %(after_id)s::bigint
            AND near.id <= %(through_id)s::bigint
        ORDER BY near.id
        LIMIT %(rows)s::bigint
    ) AS m
) AS looked_at
"""
)

NEWEST_ID: Final[LiteralString] = "SELECT p.last_id FROM pgoutbox.pulse_view AS p"

# One step of the search for the first id enqueued at a given time.
FIRST_FROM: Final[LiteralString] = """
SELECT m.id, m.created_at
FROM pgoutbox.message_view AS m
WHERE m.id >= %(id)s::bigint
ORDER BY m.id
LIMIT 1
"""

# The messages that a message superseded have slightly smaller ids; there is no index for this direction.
SUPERSEDED_BY: Final[LiteralString] = """
SELECT m.id
FROM (
    SELECT near.id, near.superseded_by
    FROM pgoutbox.message_view AS near
    WHERE near.state IN ('sent', 'skipped', 'cancelled') AND near.id < %(id)s::bigint
    ORDER BY near.id DESC
    LIMIT %(rows)s::bigint
) AS m
WHERE m.superseded_by = %(id)s::bigint
ORDER BY m.id DESC
LIMIT %(limit)s::bigint
"""

# Cheap counters of which one changes with nearly every change of a page. The statistics of the tables are up to a
# second late; they count written rows of any kind.
PULSE: Final[LiteralString] = """
SELECT p.last_id, p.last_act, p.held, p.live, p.failed, p.breakers, p.written
FROM pgoutbox.pulse_view AS p
"""
