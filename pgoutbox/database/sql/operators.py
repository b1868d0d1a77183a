"""The queries and acts of operators. They read the views, which also roles without privileges on tables may read."""

from typing import Final, LiteralString

from pgoutbox.database.sql.sessions import TRANSACTION_FORMATS

# Local to the transaction, so that the settings do not stay in a pooler's session.
PREPARE_OPERATION: Final[LiteralString] = (
    """
SELECT"""
    + TRANSACTION_FORMATS
    + """
    set_config('statement_timeout', %(statement_timeout)s::text, true),
    set_config('lock_timeout', '2s', true),
    set_config('idle_in_transaction_session_timeout', '60s', true),
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', true)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', true)
"""
)

# The functions and triggers of the schema record an act under these names, until the transaction ends.
ANNOUNCE_ACT: Final[LiteralString] = """
SELECT
    set_config('pgoutbox.act_id', %(act_id)s::text, true),
    set_config('pgoutbox.act_actor', coalesce(%(actor)s::text, ''), true),
    set_config('pgoutbox.act_origin', coalesce(%(origin)s::text, ''), true),
    set_config('pgoutbox.act_details', coalesce(%(details)s::jsonb::text, ''), true)
"""

# The newest acts first. A batch may have many ids, so the acts on one message are selected by its id.
LIST_ACTS: Final[LiteralString] = """
SELECT
    a.id,
    a.act_id,
    a.acted_at,
    a.actor,
    a.origin,
    a.db_role,
    a.action,
    a.queue,
    a.message_count,
    a.message_ids[1:20] AS first_ids,
    a.details
FROM pgoutbox.audit AS a
WHERE (%(message_id)s::bigint IS NULL OR a.message_ids @> ARRAY[%(message_id)s::bigint])
    AND (%(actor)s::text IS NULL OR a.actor = %(actor)s::text)
    AND (%(action)s::text IS NULL OR a.action = %(action)s::text)
    AND (%(before_id)s::bigint IS NULL OR a.id < %(before_id)s::bigint)
ORDER BY a.id DESC
LIMIT %(limit)s::bigint
"""

# A text is searched literally, without wildcards. Payloads are not searched: hidden values could be guessed letter by
# letter.
MATCHES: Final[LiteralString] = """(%(states)s::text[] IS NULL OR m.state = ANY (%(states)s::text[]))
    AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text)
    AND (
        %(destination)s::text IS NULL
        OR m.destination IN (%(destination)s::text, 'mailto:' || %(destination)s::text)
    )
    AND (%(key)s::text IS NULL OR %(key)s::text IN (m.coalesce_key, m.dedupe_key, m.ordering_key))
    AND (
        %(text)s::text IS NULL
        OR strpos(
            lower(
                concat_ws(
                    E'\\n',
                    m.destination,
                    m.coalesce_key,
                    m.dedupe_key,
                    m.ordering_key,
                    m.skip_reason,
                    m.last_error
                )
            ),
            lower(%(text)s::text)
        ) > 0
    )
    AND (%(created_from)s::timestamptz IS NULL OR m.created_at >= %(created_from)s::timestamptz)
    AND (%(created_before)s::timestamptz IS NULL OR m.created_at < %(created_before)s::timestamptz)
"""

# The columns of a message in lists, in the order of `messages.ListedMessage`.
LISTED: Final[LiteralString] = """
SELECT
    m.id,
    m.topic,
    m.queue,
    m.destination,
    m.state,
    m.attempt_count,
    m.max_attempts,
    m.created_at,
    m.available_at,
    m.finished_at,
    m.coalesce_key,
    m.dedupe_key,
    m.skip_reason,
    m.last_error
"""

LIST_MESSAGES: Final[LiteralString] = (
    LISTED
    + """FROM pgoutbox.message_view AS m
WHERE """
    + MATCHES
    + """    AND (%(before_id)s::bigint IS NULL OR m.id < %(before_id)s::bigint)
ORDER BY m.id DESC
LIMIT %(limit)s::bigint
"""
)

# In the order of ids, for a bulk in batches. The attempt count shows which messages have failed again since then.
LIST_MATCHING_IDS: Final[LiteralString] = (
    """
SELECT m.id, m.attempt_count
FROM pgoutbox.message_view AS m
WHERE """
    + MATCHES
    + """    AND m.id > %(after_id)s::bigint
    AND m.id <= %(last_id)s::bigint
ORDER BY m.id
LIMIT %(limit)s::bigint
"""
)

# The end of a bulk, so that it never reads its own new messages.
LAST_ID: Final[LiteralString] = "SELECT coalesce(max(m.id), 0) FROM pgoutbox.message_view AS m"

COUNT_MATCHING: Final[LiteralString] = (
    """
SELECT count(*)
FROM (
    SELECT
    FROM pgoutbox.message_view AS m
    WHERE """
    + MATCHES
    + """    LIMIT %(limit)s::bigint
) AS matching
"""
)

CANCEL_EACH: Final[LiteralString] = """
SELECT r.id, r.result
FROM pgoutbox.cancel_each(%(ids)s::bigint[], %(states)s::text[]) AS r
"""

CANCEL_BY_KEY: Final[LiteralString] = """
SELECT r.id, r.result
FROM pgoutbox.cancel_by_key(
    topic => %(topic)s::text,
    coalesce_key => %(coalesce_key)s::text,
    dedupe_key => %(dedupe_key)s::text
) AS r
"""

# Whether this role may read payloads, and not only their structure.
READS_PAYLOADS: Final[LiteralString] = (
    "SELECT has_column_privilege('pgoutbox.message', 'payload', 'SELECT')"
    " AND has_table_privilege('pgoutbox.large_payload', 'SELECT') AS reads_payloads"
)

READS_AUDIT: Final[LiteralString] = "SELECT has_table_privilege('pgoutbox.audit', 'SELECT') AS reads_audit"

_SHOWN: Final[LiteralString] = """
SELECT
    m.id,
    m.topic,
    m.queue,
    m.destination,
    m.state,
    m.attempt_count,
    m.max_attempts,
    m.created_at,
    m.available_at,
    m.expires_at,
    m.claimed_at,
    m.lease_expires_at,
    m.cancel_requested_at,
    m.finished_at,
    m.worker,
    m.coalesce_key,
    m.coalesces_pending,
    m.dedupe_key,
    m.ordering_key,
    m.on_failed,
    m.superseded_by,
    m.resend_of,
    m.content_id,
    m.skip_reason,
    left(m.last_error, %(characters)s::integer) AS last_error,
    (
        SELECT count(*)
        FROM (SELECT FROM pgoutbox.attempt_view AS a WHERE a.message_id = m.id LIMIT 10001) AS kept
    ) AS attempt_rows,
    left(as_text.headers, %(characters)s::integer) AS headers,
    octet_length(as_text.headers) AS headers_bytes,
    left(as_text.payload, %(characters)s::integer) AS payload,
    coalesce(octet_length(as_text.payload), 0) AS payload_bytes
"""

# As text, because Python does not read all JSON that PostgreSQL reads. With OFFSET 0 the text is only computed once.
SHOW_MESSAGE: Final[LiteralString] = (
    _SHOWN
    + """FROM pgoutbox.message AS m
LEFT JOIN pgoutbox.large_payload AS large ON large.message_id = m.id
CROSS JOIN LATERAL (
    SELECT m.headers::text AS headers, coalesce(m.payload, large.body)::text AS payload OFFSET 0
) AS as_text
WHERE m.id = %(id)s::bigint
"""
)
SHOW_MESSAGE_VIEW: Final[LiteralString] = (
    _SHOWN
    + """FROM pgoutbox.message_view AS m
CROSS JOIN LATERAL (SELECT m.headers::text AS headers, m.payload::text AS payload OFFSET 0) AS as_text
WHERE m.id = %(id)s::bigint
"""
)

SHOW_ATTEMPTS: Final[LiteralString] = """
SELECT
    a.attempt_count,
    a.outcome,
    a.worker,
    a.started_at,
    a.ended_at,
    left(a.error, %(characters)s::integer) AS error,
    a.reason_code,
    a.breaker_key
FROM pgoutbox.attempt_view AS a
WHERE a.message_id = %(id)s::bigint
ORDER BY a.attempt_count DESC
LIMIT %(limit)s::bigint
"""

STATS: Final[LiteralString] = """
SELECT
    m.queue,
    m.topic,
    count(*) FILTER (WHERE m.state = 'pending' AND m.available_at <= now()) AS due,
    count(*) FILTER (WHERE m.state = 'pending' AND m.available_at > now()) AS scheduled,
    count(*) FILTER (WHERE m.state = 'sending') AS sending,
    count(*) FILTER (WHERE m.state = 'sent') AS sent,
    count(*) FILTER (WHERE m.state = 'failed') AS failed,
    count(*) FILTER (WHERE m.state = 'skipped') AS skipped,
    count(*) FILTER (WHERE m.state = 'cancelled') AS cancelled,
    extract(
        epoch FROM now() - min(m.available_at) FILTER (WHERE m.state = 'pending' AND m.available_at <= now())
    )::float8 AS oldest_due_seconds
FROM pgoutbox.message_view AS m
WHERE %(queue)s::text IS NULL OR m.queue = %(queue)s::text
GROUP BY m.queue, m.topic
ORDER BY m.queue, m.topic
"""

# The number of messages that a drain waits for: in flight, due, or waiting for a retry. It does not wait for scheduled
# messages that were never attempted.
COUNT_OWED: Final[LiteralString] = """
SELECT count(*)
FROM pgoutbox.message_live AS m
WHERE m.queue = ANY (%(queues)s::text[])
    AND m.topic = ANY (%(topics)s::text[])
    AND (m.attempt_count > 0 OR m.available_at <= now())
    AND NOT EXISTS (
        SELECT
        FROM pgoutbox.message_failed AS f
        WHERE f.queue = m.queue AND f.ordering_key = m.ordering_key AND f.on_failed = 'halt' AND f.id < m.id
    )
    AND NOT EXISTS (
        -- Nor does it wait for later messages of their ordering keys.
        SELECT
        FROM pgoutbox.message_live AS e
        WHERE e.queue = m.queue
            AND e.ordering_key = m.ordering_key
            AND e.id < m.id
            AND (e.topic <> ALL (%(topics)s::text[]) OR (e.attempt_count = 0 AND e.available_at > now()))
    )
    AND NOT EXISTS (
        SELECT
        FROM pgoutbox.queue AS q
        WHERE q.name = m.queue AND q.paused_at IS NOT NULL AND (q.resume_at > now()) IS NOT FALSE
    )
"""

# Operators change messages through functions, so they need no privilege on the tables. The answer for each id has its
# state before, the newer message if it was superseded, and the other message that has its dedupe key.
REDRIVE: Final[LiteralString] = """
SELECT r.id, r.redriven, r.state, r.superseded_by, r.attempt_count, r.dedupe_key_of
FROM pgoutbox.redrive(%(ids)s::bigint[], %(states)s::text[], %(attempt_counts)s::integer[]) AS r
"""

RESEND: Final[LiteralString] = """
SELECT r.id, r.state, r.superseded_by
FROM pgoutbox.resend(%(id)s::bigint) AS r
"""

# A second pause keeps the first start, and sets the new end. Here and below all sleepers are woken, even if no session
# has the bell: no session has the bell of a paused queue. The sleepers may wait for a later end, or for none.
PAUSE_QUEUE: Final[LiteralString] = """
WITH paused AS (
    INSERT INTO pgoutbox.queue AS q (name, paused_at, resume_at)
    VALUES (%(queue)s::text, now(), now() + make_interval(secs => %(seconds)s::float8))
    ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
    SET paused_at = CASE WHEN q.resume_at <= now() THEN now() ELSE coalesce(q.paused_at, now()) END,
        resume_at = excluded.resume_at
    RETURNING q.name, q.paused_at, q.resume_at
)
SELECT
    p.paused_at,
    p.resume_at,
    CASE
        WHEN p.resume_at IS NOT NULL AND pg_notification_queue_usage() < 0.9
        THEN pg_notify('pgoutbox', 'all ' || p.name)
    END
FROM paused AS p
"""

RESUME_QUEUE: Final[LiteralString] = """
WITH resumed AS (
    UPDATE pgoutbox.queue AS q
    SET paused_at = NULL, resume_at = NULL
    WHERE q.name = %(queue)s::text
        AND q.paused_at IS NOT NULL
        AND (q.resume_at > now()) IS NOT FALSE -- A pause whose end has passed is none.
    RETURNING q.name
)
SELECT r.name, CASE WHEN pg_notification_queue_usage() < 0.9 THEN pg_notify('pgoutbox', 'all ' || r.name) END
FROM resumed AS r
"""

# A bucket begins full. When the rate changes it keeps its tokens, up to the new burst.
LIMIT_RATE: Final[LiteralString] = """
WITH limited AS (
    INSERT INTO pgoutbox.queue AS q (name, rate_count, rate_seconds, burst, tokens, tokens_at)
    SELECT a.name, a.rate_count, a.rate_seconds, a.burst, a.burst, CASE WHEN a.rate_count IS NOT NULL THEN now() END
    FROM (
        VALUES (%(queue)s::text, %(count)s::integer, %(seconds)s::float8, %(burst)s::integer)
    ) AS a(name, rate_count, rate_seconds, burst)
    ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
    SET rate_count = excluded.rate_count,
        rate_seconds = excluded.rate_seconds,
        burst = excluded.burst,
        tokens = CASE
            WHEN excluded.rate_count IS NOT NULL
                THEN least(excluded.tokens, coalesce(pgoutbox.tokens_of(q), excluded.tokens))
        END,
        tokens_at = CASE WHEN excluded.rate_count IS NOT NULL THEN clock_timestamp() END
    RETURNING q.name
)
SELECT l.name, CASE WHEN pg_notification_queue_usage() < 0.9 THEN pg_notify('pgoutbox', 'all ' || l.name) END
FROM limited AS l
"""

LIMIT_IN_FLIGHT: Final[LiteralString] = """
WITH limited AS (
    INSERT INTO pgoutbox.queue AS q (name, max_in_flight)
    VALUES (%(queue)s::text, %(max_in_flight)s::integer)
    ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE SET max_in_flight = excluded.max_in_flight
    RETURNING q.name
)
SELECT l.name, CASE WHEN pg_notification_queue_usage() < 0.9 THEN pg_notify('pgoutbox', 'all ' || l.name) END
FROM limited AS l
"""

# The queues that are paused or have limits. A pause after its end does not count.
LIST_QUEUES: Final[LiteralString] = """
SELECT
    q.name,
    q.paused_at,
    q.resume_at,
    q.rate_count,
    q.rate_seconds,
    q.burst,
    q.tokens,
    q.max_in_flight,
    q.in_flight
FROM pgoutbox.queue_view AS q
WHERE q.is_paused OR num_nonnulls(q.rate_count, q.max_in_flight) > 0
ORDER BY q.name
"""

# This stops at the first message of a known queue; the list of all queues reads every message.
UNKNOWN_QUEUES: Final[LiteralString] = """
SELECT asked.queue
FROM unnest(%(queues)s::text[]) AS asked(queue)
WHERE NOT EXISTS (SELECT FROM pgoutbox.queue_view AS q WHERE q.name = asked.queue)
    AND NOT EXISTS (SELECT FROM pgoutbox.message_view AS m WHERE m.queue = asked.queue)
ORDER BY asked.queue
"""

KNOWN_QUEUES: Final[LiteralString] = """
SELECT DISTINCT m.queue FROM pgoutbox.message_view AS m
UNION
SELECT q.name FROM pgoutbox.queue_view AS q
ORDER BY 1
"""
