"""Retention: the deletion of messages by rules."""

from typing import Final, LiteralString

COUNT_PRUNABLE: Final[LiteralString] = """
SELECT m.state, count(*)
FROM pgoutbox.message_view AS m
WHERE m.state = ANY (%(states)s::text[])
    AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    AND m.finished_at < now() - make_interval(secs => %(older_than_seconds)s::float8)
    AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
GROUP BY m.state
ORDER BY m.state
"""

# Functions delete messages, so that neither workers nor operators need the privilege to delete them.
PRUNE: Final[LiteralString] = """
SELECT p.state
FROM pgoutbox.prune(
    states => %(states)s::text[],
    older_than => make_interval(secs => %(older_than_seconds)s::float8),
    only_topic => %(topic)s::text,
    at_most => %(limit)s::bigint
) AS p(state)
"""

PRUNE_BY_RULE: Final[LiteralString] = """
SELECT p.state
FROM pgoutbox.prune_by_rule(
    rule_topic => %(topic)s::text,
    rule_state => %(state)s::text,
    since => %(since)s::timestamptz,
    until => %(until)s::timestamptz,
    at_most => %(limit)s::bigint
) AS p(state)
"""

# These facts decide the work of a turn; see `pgoutbox.operations.retention`.
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

# The worker whose write changes the time of the next turn has the turn: all others find it changed, and get no row. So
# a worker without the turn, or without work in its turn, runs only this statement. If a turn began in the future, the
# clock was ahead: the next turn is due at once, and not at that time.
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
    WHERE u.due_at <= clock_timestamp() OR u.began_at > clock_timestamp()
    RETURNING u.worker
)"""
BEGIN_UPKEEP_IF_DUE: Final[LiteralString] = _ELECT + UPKEEP_FACTS + "CROSS JOIN elected"

# Separate transactions: their locks must be released at once.
MAKE_PARTITION: Final[LiteralString] = "SELECT pgoutbox.make_partition() AS name"

# A time in thousands of years stands for infinity, which Python does not have.
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
FROM pgoutbox.retention_view AS r
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

# One page of a table of keys: the last key of the page, its number of keys, and the number of deleted keys. No row if
# no key follows.
PRUNE_COALESCE: Final[LiteralString] = """
SELECT p.last_topic, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox.prune_coalesce(
    at_most => %(limit)s::bigint,
    after_topic => %(after_scope)s::text,
    after_key => %(after_key)s::text
) AS p
"""

PRUNE_ORDERING: Final[LiteralString] = """
SELECT p.last_queue, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox.prune_ordering(
    at_most => %(limit)s::bigint,
    after_queue => %(after_scope)s::text,
    after_key => %(after_key)s::text
) AS p
"""

PRUNE_DEDUPE_BY_RULE: Final[LiteralString] = """
SELECT p.last_topic, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox.prune_dedupe_by_rule(
    rule_topic => %(topic)s::text,
    at_most => %(limit)s::bigint,
    after_topic => %(after_scope)s::text,
    after_key => %(after_key)s::text
) AS p
"""

PRUNE_DEDUPE: Final[LiteralString] = """
SELECT p.last_topic, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox.prune_dedupe(
    older_than => make_interval(secs => %(older_than_seconds)s::float8),
    only_topic => %(topic)s::text,
    at_most => %(limit)s::bigint,
    after_topic => %(after_scope)s::text,
    after_key => %(after_key)s::text
) AS p
"""

PRUNE_CONTENT: Final[LiteralString] = """
SELECT '', p.last_id::text, p.content_count, p.forgotten_count
FROM pgoutbox.prune_content(
    at_most => %(limit)s::bigint,
    after_id => coalesce(nullif(%(after_key)s::text, '')::bigint, 0)
) AS p
"""

# A renewal of a locked row lasts for one lease, which is at most a day.
FORGET_RENEWALS: Final[LiteralString] = """
DELETE FROM pgoutbox.renewal AS r
WHERE r.lease_expires_at < now() - interval '1 day'
"""
