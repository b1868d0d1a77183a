"""What is deleted, and by which rules."""

from typing import Final, LiteralString

COUNT_PRUNABLE: Final[LiteralString] = """
SELECT m.state, count(*)
FROM pgoutbox.message AS m
WHERE m.state = ANY (%(states)s::text[])
    AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    AND m.finished_at < now() - make_interval(secs => %(older_than_seconds)s::float8)
    AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
GROUP BY m.state
ORDER BY m.state
"""

# What a prune deletes is locked first: a row that a redrive has is left alone, and the state is asked for twice. What
# halted its ordering key does so no more: the workers of its queue are woken.
_DELETE_OLD: Final[LiteralString] = """, history AS (
    DELETE FROM pgoutbox.attempt AS a
    USING old AS o
    WHERE a.message_id = o.id
), keys AS (
    DELETE FROM pgoutbox.dedupe AS d
    USING old AS o
    WHERE d.topic = o.topic AND d.dedupe_key = o.dedupe_key AND d.message_id = o.id AND NOT o.keeps_dedupe_key
), gone AS (
    DELETE FROM pgoutbox.message AS m
    USING old AS o
    WHERE m.id = o.id
        AND m.finished_at = o.finished_at -- The time finds the partition.
        AND m.state = o.state
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    RETURNING m.state, m.queue, m.on_failed
), rung AS MATERIALIZED (
    SELECT pgoutbox.ring(q.queue)
    FROM (SELECT DISTINCT g.queue FROM gone AS g WHERE g.state = 'failed' AND g.on_failed = 'halt') AS q
)
SELECT g.state, (SELECT count(*) FROM rung) AS rung
FROM gone AS g
"""

_PRUNE_BY_AGE: Final[LiteralString] = """
WITH old AS MATERIALIZED (
    SELECT m.id, m.finished_at, m.state, m.topic, m.dedupe_key, false AS keeps_dedupe_key
    FROM pgoutbox.message AS m
    WHERE m.state = ANY (%(states)s::text[])
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at < now() - make_interval(secs => %(older_than_seconds)s::float8)
        AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF m SKIP LOCKED
)"""

# The dedupe key goes with its message, and is free again after that.
PRUNE: Final[LiteralString] = _PRUNE_BY_AGE + _DELETE_OLD

# One rule, as it stands now: a rule that was changed after the list of rules was read is obeyed as it is. A topic's own
# rule keeps its messages from that of all topics, and so does one that keeps for ever. The times choose a partition.
_PRUNE_BY_RULE: Final[LiteralString] = """
WITH old AS MATERIALIZED (
    SELECT m.id, m.finished_at, m.state, m.topic, m.dedupe_key, r.keep = interval '0' AS keeps_dedupe_key
    FROM pgoutbox.retention AS r
    JOIN pgoutbox.message AS m ON m.state = r.state
    WHERE r.topic = %(topic)s::text
        AND r.state = %(state)s::text
        AND m.state = %(state)s::text -- Without this, each rule would have all partitions read.
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at <= now() - r.keep
        AND m.finished_at >= %(since)s::timestamptz
        AND m.finished_at < %(until)s::timestamptz
        AND (
            m.topic = r.topic
            OR (
                r.topic = '*'
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention AS own WHERE own.topic = m.topic AND own.state = r.state
                )
            )
        )
    LIMIT %(limit)s::bigint
    FOR UPDATE OF m SKIP LOCKED
)"""
PRUNE_BY_RULE: Final[LiteralString] = _PRUNE_BY_RULE + _DELETE_OLD

# Locked, they are still those that were looked at.
_DELETE_OLD_KEYS: Final[LiteralString] = """
DELETE FROM pgoutbox.dedupe AS d
USING old AS o
WHERE d.topic = o.topic AND d.dedupe_key = o.dedupe_key
RETURNING d.message_id
"""

# Keys whose message is deleted, by a rule of their own.
_PRUNE_DEDUPE_BY_RULE: Final[LiteralString] = """
WITH old AS MATERIALIZED (
    SELECT d.topic, d.dedupe_key
    FROM pgoutbox.retention AS r
    CROSS JOIN pgoutbox.dedupe AS d
    WHERE r.topic = %(topic)s::text
        AND r.state = 'dedupe_key'
        AND d.created_at <= now() - r.keep
        AND (
            d.topic = r.topic
            OR (
                r.topic = '*'
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention AS own WHERE own.topic = d.topic AND own.state = r.state
                )
            )
        )
        AND NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.id = d.message_id)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF d SKIP LOCKED
)"""

PRUNE_DEDUPE_BY_RULE: Final[LiteralString] = _PRUNE_DEDUPE_BY_RULE + _DELETE_OLD_KEYS

# The same by age alone, for those who prune without rules.
_PRUNE_DEDUPE_BY_AGE: Final[LiteralString] = """
WITH old AS MATERIALIZED (
    SELECT d.topic, d.dedupe_key
    FROM pgoutbox.dedupe AS d
    WHERE d.created_at < now() - make_interval(secs => %(older_than_seconds)s::float8)
        AND (%(topic)s::text IS NULL OR d.topic = %(topic)s::text)
        AND NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.id = d.message_id)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF d SKIP LOCKED
)"""
PRUNE_DEDUPE: Final[LiteralString] = _PRUNE_DEDUPE_BY_AGE + _DELETE_OLD_KEYS

# What there is to be done is decided by these few facts; see `pgoutbox.maintenance`.
UPKEEP_FACTS: Final[LiteralString] = """
SELECT
    now() AS asked_at,
    pg_relation_size('pgoutbox.message_done_default') AS default_bytes,
    EXISTS (SELECT FROM pgoutbox.retired) AS has_retired,
    p.names,
    p.lowers_at,
    p.uppers_at,
    r.topics,
    r.states,
    r.keeps_seconds
FROM (
    SELECT
        array_agg(p.name ORDER BY p.lower_at) AS names,
        array_agg(p.lower_at ORDER BY p.lower_at) AS lowers_at,
        array_agg(p.upper_at ORDER BY p.lower_at) AS uppers_at
    FROM pgoutbox.partitions() AS p
) AS p
CROSS JOIN (
    SELECT
        array_agg(r.topic ORDER BY r.topic = '*', r.topic, r.state) AS topics,
        array_agg(r.state ORDER BY r.topic = '*', r.topic, r.state) AS states,
        array_agg(extract(epoch FROM r.keep)::float8 ORDER BY r.topic = '*', r.topic, r.state) AS keeps_seconds
    FROM pgoutbox.retention AS r
) AS r
"""

# The turn belongs to the one whose write moves the time of the next: all others find it moved, and get no row. So one
# statement is all that a worker runs which does not have the turn, or which has it and finds nothing to do.
_ELECT: Final[LiteralString] = """
WITH elected AS MATERIALIZED (
    INSERT INTO pgoutbox.upkeep AS u (due_at, began_at, worker)
    VALUES (
        clock_timestamp() + make_interval(secs => %(interval_seconds)s::float8),
        clock_timestamp(),
        %(worker)s::text
    )
    ON CONFLICT ON CONSTRAINT upkeep_pkey DO UPDATE
    SET due_at = excluded.due_at,
        began_at = excluded.began_at,
        worker = excluded.worker
    WHERE u.due_at <= clock_timestamp()
    RETURNING u.worker
)"""
BEGIN_UPKEEP_IF_DUE: Final[LiteralString] = _ELECT + UPKEEP_FACTS + "CROSS JOIN elected"

# Transactions of their own: the locks that they need must be given back at once.
MAKE_PARTITION: Final[LiteralString] = "SELECT pgoutbox.make_partition() AS name"

# For ever is as good as for thousands of years, and Python knows that time.
KEPT_UNTIL: Final[LiteralString] = """
SELECT
    greatest(
        least(
            pgoutbox.kept_until(%(lower_at)s::timestamptz, %(upper_at)s::timestamptz), timestamptz '9000-01-01 00:00Z'
        ),
        timestamptz '2000-01-01 00:00Z'
    ) AS kept_until
"""

RETIRE_PARTITION: Final[LiteralString] = "SELECT pgoutbox.retire_partition(%(name)s::text) AS answer"

CLEAR_RETIRED: Final[LiteralString] = """
SELECT c.name, c.cleared_count, c.is_dropped
FROM pgoutbox.clear_retired(%(limit)s::integer) AS c
"""

RETENTION_RULES: Final[LiteralString] = """
SELECT r.topic, r.state, r.keep
FROM pgoutbox.retention AS r
ORDER BY r.topic = '*', r.topic, r.state
"""

SET_RETENTION: Final[LiteralString] = """
INSERT INTO pgoutbox.retention (topic, state, keep)
VALUES (%(topic)s::text, %(state)s::text, make_interval(secs => %(keep_seconds)s::float8))
ON CONFLICT ON CONSTRAINT retention_pkey DO UPDATE SET keep = excluded.keep
RETURNING topic
"""

UNSET_RETENTION: Final[LiteralString] = """
DELETE FROM pgoutbox.retention AS r
WHERE r.topic = %(topic)s::text AND r.state = %(state)s::text
RETURNING r.topic
"""

# A head can be forgotten when every message of its key is gone: ids of one key only grow, so that is certain when its
# newest message is older than the oldest message there is. A head that an open transaction holds is left alone.
PRUNE_COALESCE: Final[LiteralString] = """
WITH forgotten AS MATERIALIZED (
    SELECT head.topic, head.coalesce_key
    FROM pgoutbox.coalesce AS head
    WHERE head.newest_id < coalesce((SELECT min(m.id) FROM pgoutbox.message AS m), 0)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF head SKIP LOCKED
)
DELETE FROM pgoutbox.coalesce AS head
USING forgotten AS f
WHERE head.topic = f.topic AND head.coalesce_key = f.coalesce_key
"""

# The same of ordering keys.
PRUNE_ORDERING: Final[LiteralString] = """
WITH forgotten AS MATERIALIZED (
    SELECT tail.queue, tail.ordering_key
    FROM pgoutbox.ordering AS tail
    WHERE tail.last_id < coalesce((SELECT min(m.id) FROM pgoutbox.message AS m), 0)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF tail SKIP LOCKED
)
DELETE FROM pgoutbox.ordering AS tail
USING forgotten AS f
WHERE tail.queue = f.queue AND tail.ordering_key = f.ordering_key
"""

# A content goes with the last message that names it.
PRUNE_CONTENT: Final[LiteralString] = """
DELETE FROM pgoutbox.content AS c
WHERE c.id IN (
    SELECT unused.id
    FROM pgoutbox.content AS unused
    WHERE NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.content_id = unused.id)
    LIMIT %(limit)s::bigint
)
"""
