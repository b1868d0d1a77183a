"""The queries of live displays: open messages, workers, and outcomes of attempts."""

from typing import Final, LiteralString

# Reads only live and failed messages, so that the number of sent messages does not matter.
OWED_BY_TOPIC: Final[LiteralString] = """
SELECT
    m.queue,
    m.topic,
    count(*) FILTER (WHERE m.state = 'pending' AND m.attempt_count = 0 AND m.available_at <= now()) AS due,
    count(*) FILTER (WHERE m.state = 'pending' AND m.attempt_count > 0) AS retrying,
    count(*) FILTER (WHERE m.state = 'pending' AND m.attempt_count = 0 AND m.available_at > now()) AS scheduled,
    count(*) FILTER (WHERE m.state = 'sending') AS sending,
    count(*) FILTER (WHERE m.state = 'failed') AS failed,
    extract(
        epoch FROM now() - min(m.available_at) FILTER (WHERE m.state = 'pending' AND m.available_at <= now())
    )::float8 AS oldest_due_seconds
FROM pgoutbox.message_view AS m
WHERE m.state IN ('pending', 'sending', 'failed')
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text)
GROUP BY m.queue, m.topic
"""

# Messages that ended in the last seconds; found by the block ranges of finished_at.
ENDED_BY_TOPIC: Final[LiteralString] = """
SELECT
    m.queue,
    m.topic,
    count(*) FILTER (WHERE m.state = 'sent') AS sent,
    count(*) AS ended
FROM pgoutbox.message_view AS m
WHERE m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    AND m.finished_at > now() - make_interval(secs => %(seconds)s::float8)
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text)
GROUP BY m.queue, m.topic
"""

# The workers that hold messages, and connected workers without messages. The name of a connection has the last 48
# characters of the worker's name. Only members of pg_read_all_stats see connections of other roles.
LIST_WORKERS: Final[LiteralString] = """
WITH held AS (
    SELECT
        m.worker,
        count(*) AS in_flight,
        count(*) FILTER (WHERE m.lease_expires_at <= now()) AS lapsed,
        min(m.claimed_at) AS oldest_claimed_at,
        min(m.lease_expires_at) AS lease_expires_at,
        array_agg(DISTINCT m.queue) AS queues
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'sending'
    GROUP BY m.worker
), connected AS (
    SELECT
        substr(a.application_name, 16) AS name,
        min(a.backend_start) AS connected_at,
        min(host(a.client_addr)) AS address
    FROM pg_catalog.pg_stat_activity AS a
    WHERE a.datname = current_database() AND starts_with(a.application_name, 'pgoutbox claim ')
    GROUP BY a.application_name
)
SELECT
    coalesce(h.worker, c.name) AS worker,
    coalesce(h.in_flight, 0) AS in_flight,
    coalesce(h.lapsed, 0) AS lapsed,
    h.oldest_claimed_at,
    h.lease_expires_at,
    coalesce(h.queues, '{}') AS queues,
    c.connected_at,
    c.address
FROM held AS h
FULL JOIN connected AS c ON c.name = right(h.worker, 48)
ORDER BY 1
"""

NOW: Final[LiteralString] = "SELECT now()"

# Outcomes of attempts, page by page. For a message that is pending again only the last attempt is looked up.
LIST_OUTCOMES: Final[LiteralString] = """
SELECT o.ended_at, o.message_id, o.attempt_count, o.outcome, o.topic, o.queue, o.destination, o.worker, o.reason
FROM (
    SELECT
        m.finished_at AS ended_at,
        m.id AS message_id,
        m.attempt_count,
        m.state AS outcome,
        m.topic,
        m.queue,
        m.destination,
        m.worker,
        CASE m.state WHEN 'sent' THEN NULL WHEN 'skipped' THEN m.skip_reason ELSE m.last_error END AS reason
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('sent', 'failed', 'skipped', 'cancelled') AND m.finished_at >= %(ended_from)s::timestamptz
    UNION ALL
    SELECT
        a.ended_at,
        a.message_id,
        a.attempt_count,
        a.outcome,
        m.topic,
        m.queue,
        m.destination,
        a.worker,
        a.error AS reason
    FROM pgoutbox.message_view AS m
    JOIN pgoutbox.attempt_view AS a
        ON a.message_id = m.id
        AND a.attempt_count = m.attempt_count - CASE m.state WHEN 'sending' THEN 1 ELSE 0 END
    WHERE m.state IN ('pending', 'sending') AND m.attempt_count > 0 AND a.ended_at >= %(ended_from)s::timestamptz
) AS o
WHERE (%(topic)s::text IS NULL OR o.topic = %(topic)s::text)
    AND (%(queue)s::text IS NULL OR o.queue = %(queue)s::text)
    AND (%(outcomes)s::text[] IS NULL OR o.outcome = ANY (%(outcomes)s::text[]))
    AND (
        %(after_ended_at)s::timestamptz IS NULL
        OR (o.ended_at, o.message_id, o.attempt_count)
            > (%(after_ended_at)s::timestamptz, %(after_id)s::bigint, %(after_count)s::integer)
    )
ORDER BY o.ended_at, o.message_id, o.attempt_count
LIMIT %(limit)s::bigint
"""
