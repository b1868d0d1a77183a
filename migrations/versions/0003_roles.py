"""Permissions: the views for people, the functions for operators, and the roles `pgoutbox_producer`, `_worker`,
`_operator` and `_viewer` with their privileges.

Roles belong to the whole cluster, and few users may create them. `pgoutbox.set_up_roles()` creates them if it may, and
grants their privileges in this database as soon as they exist. It can be called again at any time.
"""

from __future__ import annotations

from alembic import op

revision = "pgoutbox_0003"
down_revision = "pgoutbox_0002"
branch_labels = None
depends_on = None

SCHEMA_VERSION = """
CREATE OR REPLACE FUNCTION pgoutbox.schema_version()
RETURNS integer
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
AS 'SELECT 3'
"""

FORMER_SCHEMA_VERSION = SCHEMA_VERSION.replace("SELECT 3", "SELECT 2")

# --- redacted views ---------------------------------------------------------------------------------------------------

# Redaction hides too much rather than too little: everything after a telling name. Most texts have no such name, and
# are scanned once.
REDACTED_TEXT = r"""
CREATE FUNCTION pgoutbox.redacted_text(value text)
RETURNS text
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
RETURN CASE
    WHEN pg_catalog.strpos(value, '://') OPERATOR(pg_catalog.=) 0
        AND value OPERATOR(pg_catalog.!~*)
            'pass|pwd|secret|token|authoriz|cookie|credential|key|value|bearer|basic|digest|sig|jwt|eyj|a[ks]ia|aiza'
        THEN value
    ELSE pg_catalog.regexp_replace(
        pg_catalog.regexp_replace(
            pg_catalog.regexp_replace(
                pg_catalog.regexp_replace(
                    pg_catalog.regexp_replace(
                        value,
                        '(://)([^\s/?#"''<>]*'
                            '|[^\s/?#"''<>:@]*:(?![0-9]+[\s/?#,;.)])([^\s"''<>]*|[^\r\n"''<>@]*))@',
                        '\1(redacted)@',
                        'g'
                    ),
                    '\m(eyJ[\w-]+\.[\w-]+\.[\w-]*|A[KS]IA[A-Z0-9]+|AIza[\w-]+)'
                        '|-----BEGIN [A-Z ]*PRIVATE KEY-----.*',
                    '(redacted)',
                    'g'
                ),
                '\m(bearer|basic|digest)\s+[\w.~+/=-]{6,}',
                '\1 (redacted)',
                'gi'
            ),
            '\m(passwd|password|passphrase|pwd)(\s+(is\s+)?)(?=\S*[0-9])\S+',
            '\1\2(redacted)',
            'gi'
        ),
        '(((pass[-_]*w[-_]*o?[-_]*r?[-_]*d|pass[-_]*phrase|secret|token|authorization|cookie|credential'
            '|api[-_]*key|access[-_]*key|private[-_]*key|input[-_]*value)[\w.-]*'
            '|(?<![a-z])(pass|pwd|jwt|sig|signature)|[?&]key)[\\"'')\]\s]*[=:]+>?).*',
        '\1(redacted)',
        'i'
    )
END
"""

# The structure of a payload, without its values. Member names stay if they look like names, and the number of members
# stays. Deeper levels are left out, so that no payload is too deep for this function.
REDACTED_JSON = """
CREATE FUNCTION pgoutbox.redacted_json(value jsonb, levels integer DEFAULT 8)
RETURNS jsonb
LANGUAGE plpgsql
IMMUTABLE
PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN CASE
        WHEN value IS NULL THEN NULL
        WHEN levels > 0 AND jsonb_typeof(value) = 'object' THEN (
            SELECT coalesce(
                jsonb_object_agg(
                    CASE WHEN member.key ~ '^[A-Za-z_][A-Za-z0-9_.-]{0,39}$' THEN member.key ELSE '(redacted)' END,
                    pgoutbox.redacted_json(member.value, levels - 1)
                ),
                '{}'
            )
            FROM jsonb_each(value) AS member
        )
        WHEN levels > 0 AND jsonb_typeof(value) = 'array' THEN (
            SELECT coalesce(jsonb_agg(pgoutbox.redacted_json(e.element, levels - 1) ORDER BY e.number), '[]')
            FROM jsonb_array_elements(value) WITH ORDINALITY AS e(element, number)
        )
        ELSE to_jsonb('(redacted)'::text)
    END;
END
$function$
"""

# The views read with their owner's privileges, so that viewers need none on the tables: hence not `security_invoker`.
# They hide no rows, so `security_barrier`, which keeps conditions away from indexes, would protect nothing.
MESSAGE_VIEW = """
CREATE VIEW pgoutbox.message_view AS
SELECT
    m.id,
    m.topic,
    m.queue,
    pgoutbox.redacted_text(m.destination) AS destination,
    m.state,
    m.attempt_count,
    m.max_attempts,
    m.attempt_budget,
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
    pgoutbox.redacted_text(m.skip_reason) AS skip_reason,
    pgoutbox.redacted_text(m.last_error) AS last_error,
    pgoutbox.redacted_json(m.headers) AS headers,
    pgoutbox.redacted_json(
        coalesce(m.payload, (SELECT l.body FROM pgoutbox.large_payload AS l WHERE l.message_id = m.id))
    ) AS payload
FROM pgoutbox.message AS m
"""

ATTEMPT_VIEW = """
CREATE VIEW pgoutbox.attempt_view AS
SELECT
    a.message_id,
    a.attempt_count,
    a.outcome,
    a.worker,
    a.started_at,
    a.ended_at,
    pgoutbox.redacted_text(a.error) AS error,
    a.reason_code,
    a.breaker_key
FROM pgoutbox.attempt AS a
"""

# With `now()`, messages in flight are counted only if the query uses the column. A volatile column is always computed.
QUEUE_VIEW = """
CREATE VIEW pgoutbox.queue_view AS
SELECT
    q.name,
    q.paused_at IS NOT NULL AND (q.resume_at > now()) IS NOT FALSE AS is_paused,
    q.paused_at,
    q.resume_at,
    q.rate_count,
    q.rate_seconds,
    q.burst,
    pgoutbox.tokens_of(q) AS tokens,
    q.max_in_flight,
    (
        SELECT count(*)
        FROM pgoutbox.message_live AS m
        WHERE m.queue = q.name AND m.state = 'sending' AND m.lease_expires_at > now()
    ) AS in_flight
FROM pgoutbox.queue AS q
"""

BREAKER_VIEW = """
CREATE VIEW pgoutbox.breaker_view AS
SELECT
    b.key,
    b.opened_at,
    b.retry_at,
    b.cooldown_seconds,
    b.probe_until,
    b.worker,
    pgoutbox.redacted_text(b.last_error) AS last_error
FROM pgoutbox.breaker AS b
"""

RETENTION_VIEW = """
CREATE VIEW pgoutbox.retention_view AS
SELECT
    r.topic,
    r.state,
    r.keep
FROM pgoutbox.retention AS r
"""

# The reasons have the order of the claim's checks. `breaker` and `unavailable` come from the reason code of the last
# attempt; the other reasons follow from the rows.
WAITING_VIEW = """
CREATE VIEW pgoutbox.waiting_view AS
WITH control AS MATERIALIZED (
    SELECT q.name, q.is_paused, q.resume_at, q.rate_count, q.rate_seconds, q.tokens, q.max_in_flight, q.in_flight
    FROM pgoutbox.queue_view AS q
)
SELECT
    m.id,
    m.topic,
    m.queue,
    pgoutbox.redacted_text(m.destination) AS destination,
    m.attempt_count,
    m.created_at,
    m.available_at,
    why.reason,
    CASE why.reason
        WHEN 'superseded' THEN head.newest_id
        WHEN 'halted' THEN halt.id
        WHEN 'in order' THEN earlier.id
        WHEN 'in flight' THEN sibling.id
    END AS waits_for,
    CASE why.reason
        WHEN 'paused' THEN control.resume_at
        WHEN 'scheduled' THEN m.available_at
        WHEN 'retry' THEN m.available_at
        WHEN 'breaker' THEN m.available_at
        WHEN 'unavailable' THEN m.available_at
        WHEN 'rate' THEN now() + make_interval(
            secs => (1 - control.tokens) * control.rate_seconds / control.rate_count
        )
    END AS until
FROM pgoutbox.message_live AS m
LEFT JOIN control ON control.name = m.queue
LEFT JOIN pgoutbox.coalesce AS head
    ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
        AND m.coalesces_pending IS NOT TRUE
LEFT JOIN LATERAL (
    SELECT f.id
    FROM pgoutbox.message_failed AS f
    WHERE f.queue = m.queue AND f.ordering_key = m.ordering_key AND f.on_failed = 'halt' AND f.id < m.id
    ORDER BY f.id
    LIMIT 1
) AS halt ON m.ordering_key IS NOT NULL
LEFT JOIN LATERAL (
    SELECT e.id
    FROM pgoutbox.message_live AS e
    WHERE e.queue = m.queue AND e.ordering_key = m.ordering_key AND e.id < m.id
    ORDER BY e.id
    LIMIT 1
) AS earlier ON m.ordering_key IS NOT NULL
LEFT JOIN LATERAL (
    SELECT s.id
    FROM pgoutbox.message_live AS s
    WHERE s.topic = m.topic AND s.coalesce_key = m.coalesce_key AND s.state = 'sending' AND s.id <> m.id
    LIMIT 1
) AS sibling ON m.coalesce_key IS NOT NULL
LEFT JOIN LATERAL (
    SELECT a.reason_code
    FROM pgoutbox.attempt AS a
    WHERE a.message_id = m.id AND a.attempt_count = m.attempt_count
) AS last_attempt ON m.attempt_count > 0
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN control.is_paused THEN 'paused'
        WHEN m.available_at > now() AND last_attempt.reason_code IN ('circuit_open', 'stalled') THEN 'breaker'
        WHEN m.available_at > now() AND last_attempt.reason_code = 'unavailable' THEN 'unavailable'
        WHEN m.available_at > now() AND m.attempt_count > 0 THEN 'retry'
        WHEN m.available_at > now() THEN 'scheduled'
        WHEN head.newest_id IS NOT NULL THEN 'superseded'
        WHEN halt.id IS NOT NULL THEN 'halted'
        WHEN earlier.id IS NOT NULL THEN 'in order'
        WHEN sibling.id IS NOT NULL THEN 'in flight'
        WHEN control.tokens < 1 THEN 'rate'
        WHEN control.in_flight >= control.max_in_flight THEN 'max_in_flight'
        ELSE 'due'
    END AS reason
) AS why
WHERE m.state = 'pending'
"""

# Counters for a dashboard that change with the outbox, and the last id drawn. They reveal no data of the tables that
# only the owner may read. All of them together are cheap, and unused columns cost nothing.
PULSE_VIEW = """
CREATE VIEW pgoutbox.pulse_view AS
SELECT
    (SELECT s.last_value FROM pgoutbox.message_id_seq AS s) AS last_id,
    (SELECT max(a.id) FROM pgoutbox.audit AS a) AS last_act,
    (
        SELECT count(*)
        FROM (SELECT FROM pgoutbox.message_live AS m WHERE m.lease_expires_at IS NOT NULL LIMIT 1000) AS held
    ) AS held,
    (SELECT count(*) FROM (SELECT FROM pgoutbox.message_live AS m LIMIT 1000) AS live) AS live,
    (SELECT count(*) FROM (SELECT FROM pgoutbox.message_failed AS m LIMIT 1000) AS failed) AS failed,
    (SELECT count(*) FROM (SELECT FROM pgoutbox.breaker AS b LIMIT 1000) AS breakers) AS breakers,
    (
        SELECT sum(
            pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid) + pg_stat_get_tuples_deleted(c.oid)
        )
        FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = 'pgoutbox'::regnamespace AND c.relkind = 'r'
    ) AS written
"""

VIEWS = {
    "message_view": MESSAGE_VIEW,
    "attempt_view": ATTEMPT_VIEW,
    "queue_view": QUEUE_VIEW,
    "breaker_view": BREAKER_VIEW,
    "retention_view": RETENTION_VIEW,
    "waiting_view": WAITING_VIEW,
    "pulse_view": PULSE_VIEW,
}

# --- functions for other roles ----------------------------------------------------------------------------------------

# PostgreSQL shows the statistics of a column only to roles that may read it, even through a view: hence a function.
DONE_ESTIMATE = """
CREATE FUNCTION pgoutbox.done_estimate()
RETURNS TABLE (state text, messages bigint)
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT common.state, sum(c.reltuples * common.share)::bigint
FROM pg_partition_tree('pgoutbox.message_done') AS part
JOIN pg_class AS c ON c.oid = part.relid
JOIN pg_stats AS s ON s.schemaname = 'pgoutbox' AND s.tablename = c.relname AND s.attname = 'state'
CROSS JOIN LATERAL unnest(s.most_common_vals::text::text[], s.most_common_freqs) AS common(state, share)
WHERE part.isleaf AND c.reltuples > 0
GROUP BY common.state
$function$
"""

# A worker has no privilege to delete. This function deletes a sent message only if its attempt is in flight and a rule
# deletes sent messages.
FORGET_SENT = """
CREATE FUNCTION pgoutbox.forget_sent(ids bigint[], attempt_counts integer[], worker text)
RETURNS SETOF bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT m.id, m.attempt_count, m.topic
        FROM unnest(ids, attempt_counts) AS o(id, attempt_count)
        JOIN pgoutbox.message_live AS m ON m.id = o.id
        WHERE m.attempt_count = o.attempt_count AND m.worker = forget_sent.worker
    ), forgetful AS MATERIALIZED (
        SELECT t.topic
        FROM (SELECT DISTINCT a.topic FROM asked AS a) AS t
        WHERE EXISTS (
                SELECT
                FROM pgoutbox.retention AS r
                WHERE r.topic IN (t.topic, '*')
                    AND r.state = 'sent'
                    AND r.keep = interval '0'
                    AND (
                        r.topic = t.topic
                        OR NOT EXISTS (
                            SELECT FROM pgoutbox.retention AS own WHERE own.topic = t.topic AND own.state = 'sent'
                        )
                    )
            )
    ), forgotten AS (
        DELETE FROM pgoutbox.message_live AS m
        USING asked AS a
        WHERE m.id = a.id
            AND m.state = 'sending'
            AND m.attempt_count = a.attempt_count
            AND m.worker = forget_sent.worker
            AND a.topic = ANY (ARRAY(SELECT f.topic FROM forgetful AS f))
        RETURNING m.id, m.payload IS NULL AS has_large_payload
    ), history AS (
        DELETE FROM pgoutbox.attempt AS a
        USING forgotten AS f
        WHERE a.message_id = f.id
    ), large AS (
        DELETE FROM pgoutbox.large_payload AS l
        USING forgotten AS f
        WHERE l.message_id = f.id AND f.has_large_payload
    )
    SELECT f.id
    FROM forgotten AS f;
END
$function$
"""

# The result has for each id the state before, the newer message if it was superseded, and the message that has its
# dedupe key if another one has it. A message can change between the query of a filter and this call: somebody cancelled
# a failed message, or it was tried again and failed with another error, perhaps with an unknown outcome. The caller did
# not ask for these messages.
REDRIVE = """
CREATE FUNCTION pgoutbox.redrive(
    ids bigint[], states text[] DEFAULT '{failed,cancelled}', attempt_counts integer[] DEFAULT NULL
)
RETURNS TABLE (
    id bigint, redriven boolean, state text, superseded_by bigint, attempt_count integer, dedupe_key_of bigint
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH asked AS (
        SELECT DISTINCT ON (a.id) a.id, a.attempt_count
        FROM unnest(ids, attempt_counts) AS a(id, attempt_count)
        ORDER BY a.id
    ), locked AS MATERIALIZED (
        SELECT m.id, m.state, m.topic, m.dedupe_key, head.newest_id
        FROM asked AS a
        JOIN pgoutbox.message AS m ON m.id = a.id
        LEFT JOIN pgoutbox.coalesce AS head ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key
        WHERE m.state IN ('failed', 'cancelled')
            AND m.state = ANY (redrive.states)
            AND m.attempt_count = coalesce(a.attempt_count, m.attempt_count)
        ORDER BY m.id
        FOR UPDATE OF m SKIP LOCKED
    ), keyed AS MATERIALIZED (
        -- enqueue gives the dedupe key of a cancelled message to the next one while it holds this lock.
        SELECT l.id
        FROM locked AS l
        JOIN pgoutbox.dedupe AS d ON d.topic = l.topic AND d.dedupe_key = l.dedupe_key
        WHERE d.message_id = l.id
        FOR UPDATE OF d SKIP LOCKED
    ), rekeyed AS (
        -- The message that took over the key may be deleted, and its key too.
        INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest)
        SELECT l.id, l.topic, l.dedupe_key, (pgoutbox.payload_digests(pgoutbox.payload_of(m)))[1]
        FROM locked AS l
        JOIN pgoutbox.message AS m ON m.id = l.id AND m.state = l.state
        WHERE l.dedupe_key IS NOT NULL
            AND NOT EXISTS (
                SELECT FROM pgoutbox.dedupe AS d WHERE d.topic = l.topic AND d.dedupe_key = l.dedupe_key
            )
        ORDER BY l.id DESC
        ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING
        RETURNING message_id
    ), redriven AS (
        UPDATE pgoutbox.message AS m
        SET state = 'pending',
            available_at = now(),
            finished_at = NULL,
            cancel_requested_at = NULL,
            max_attempts = m.attempt_count + m.attempt_budget
        FROM locked AS l
        WHERE m.id = l.id
            AND m.state = l.state
            AND m.state IN ('failed', 'cancelled')
            AND coalesce(l.newest_id <= m.id, true)
            AND (
                l.dedupe_key IS NULL
                OR EXISTS (SELECT FROM keyed AS k WHERE k.id = l.id)
                OR EXISTS (SELECT FROM rekeyed AS k WHERE k.message_id = l.id)
            )
        RETURNING m.id, m.queue
    ), rung AS MATERIALIZED (
        SELECT pgoutbox.ring(q.queue)
        FROM (SELECT DISTINCT r.queue FROM redriven AS r) AS q
    ), recorded AS MATERIALIZED (
        SELECT pgoutbox.record_act('redrive', message_ids => array_agg(r.id ORDER BY r.id))
        FROM redriven AS r
        HAVING count(*) > 0
    )
    SELECT
        a.id,
        r.id IS NOT NULL AND (SELECT count(*) FROM rung) >= 0 AND (SELECT count(*) FROM recorded) >= 0,
        m.state,
        CASE WHEN head.newest_id > a.id THEN head.newest_id END,
        m.attempt_count,
        CASE WHEN d.message_id <> a.id THEN d.message_id END
    FROM asked AS a
    LEFT JOIN pgoutbox.message AS m ON m.id = a.id
    LEFT JOIN pgoutbox.coalesce AS head ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key
    LEFT JOIN pgoutbox.dedupe AS d ON d.topic = m.topic AND d.dedupe_key = m.dedupe_key
    LEFT JOIN redriven AS r ON r.id = a.id
    ORDER BY a.id;
END
$function$
"""

# The head is locked first: between a look at it and the enqueue a newer message could commit. The copy, which draws its
# id last, would then supersede it with older content. The source is locked as well: if a prune deleted it before the
# copy commits, it would also delete the content, to which no other message refers. Only the message that the head names
# is the newest of its key. A missing head was deleted after its newest message. A head with a smaller id was inserted
# later, by a transaction that had drawn its id before.
RESEND = """
CREATE FUNCTION pgoutbox.resend(message_id bigint)
RETURNS TABLE (id bigint, state text, superseded_by bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    shared_id bigint;
BEGIN
    WITH source AS MATERIALIZED (
        SELECT m.id
        FROM pgoutbox.message AS m
        WHERE m.id = resend.message_id AND m.state = 'sent'
        FOR KEY SHARE OF m
    ), head AS MATERIALIZED (
        SELECT c.newest_id
        FROM pgoutbox.message AS m
        JOIN pgoutbox.coalesce AS c ON c.topic = m.topic AND c.coalesce_key = m.coalesce_key
        WHERE m.id = resend.message_id
        FOR UPDATE OF c
    )
    SELECT
        copy.id, m.state, CASE WHEN copy.id IS NULL AND head.newest_id <> m.id THEN head.newest_id END, m.content_id
    INTO resend.id, resend.state, resend.superseded_by, shared_id
    FROM pgoutbox.message AS m
    LEFT JOIN head ON true
    LEFT JOIN LATERAL (
        SELECT pgoutbox.enqueue(
            topic => m.topic,
            payload => pgoutbox.payload_of(m),
            queue => m.queue,
            destination => m.destination,
            coalesce_key => m.coalesce_key,
            coalesce_rule => CASE WHEN m.coalesces_pending THEN 'pending' END,
            headers => m.headers,
            max_attempts => m.attempt_budget,
            ordering_key => m.ordering_key,
            on_failed => m.on_failed
        ) AS id
        WHERE m.state = 'sent' AND (
                m.coalesce_key IS NULL
                OR head.newest_id = m.id
                OR (m.coalesces_pending AND coalesce(head.newest_id < m.id, true))
            )
    ) AS copy ON true
    WHERE m.id = resend.message_id
        AND (m.state <> 'sent' OR EXISTS (SELECT FROM source AS s WHERE s.id = m.id));
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- The copy is visible only to this transaction.
    UPDATE pgoutbox.message_live AS m
    SET resend_of = resend.message_id,
        content_id = shared_id
    WHERE m.id = resend.id AND m.state = 'pending' AND m.resend_of IS NULL;
    IF resend.id IS NOT NULL THEN
        PERFORM pgoutbox.record_act(
            'resend', message_ids => ARRAY[resend.message_id], details => jsonb_build_object('copy', resend.id)
        );
    END IF;
    RETURN NEXT;
END
$function$
"""

# The rows are locked first. Rows that a redrive has locked are skipped, and the state is checked twice. The dedupe key
# is deleted with its message, unless a rule deletes sent messages at once: then the key has its own rule. A deleted
# message no longer halts its ordering key, so the workers of its queue are woken.
_DELETE_OLD = """, history AS (
    DELETE FROM pgoutbox.attempt AS a
    USING old AS o
    WHERE a.message_id = o.id
), large AS (
    -- After a sequence was set back, another message may have the same id. Only one without a payload has a row here.
    DELETE FROM pgoutbox.large_payload AS l
    USING old AS o
    WHERE l.message_id = o.id AND o.has_large_payload
), keys AS (
    DELETE FROM pgoutbox.dedupe AS d
    USING old AS o
    WHERE d.topic = o.topic AND d.dedupe_key = o.dedupe_key AND d.message_id = o.id AND NOT o.keeps_dedupe_key
), gone AS (
    DELETE FROM pgoutbox.message AS m
    USING old AS o
    WHERE m.id = o.id
        AND m.finished_at = o.finished_at -- The time selects the partition.
        AND m.state = o.state
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    RETURNING m.state, m.queue, m.on_failed
), rung AS MATERIALIZED (
    SELECT pgoutbox.ring(q.queue)
    FROM (SELECT DISTINCT g.queue FROM gone AS g WHERE g.state = 'failed' AND g.on_failed = 'halt') AS q
), recorded AS MATERIALIZED (
    SELECT pgoutbox.record_act('prune', message_count => count(*)::integer)
    FROM gone AS g
    HAVING count(*) > 0 AND pgoutbox.is_act()
)
SELECT g.state
FROM gone AS g
WHERE (SELECT count(*) FROM rung) >= 0 AND (SELECT count(*) FROM recorded) >= 0
$function$
"""

PRUNE = """
CREATE FUNCTION pgoutbox.prune(states text[], older_than interval, only_topic text, at_most bigint)
RETURNS SETOF text
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
WITH old AS MATERIALIZED (
    SELECT m.id, m.finished_at, m.state, m.topic, m.dedupe_key, m.payload IS NULL AS has_large_payload,
        false AS keeps_dedupe_key
    FROM pgoutbox.message AS m
    WHERE m.state = ANY (states)
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at < now() - older_than
        AND (only_topic IS NULL OR m.topic = only_topic)
    LIMIT at_most
    FOR UPDATE OF m SKIP LOCKED
)DELETE_OLD""".replace("DELETE_OLD", _DELETE_OLD)

# Apply one rule in its current version, even if it was changed after the list of rules was read. A transaction that
# changes a rule waits for the batch, so that nothing is deleted by the old rule afterwards. A topic with its own rule
# is exempt from the rule of all topics, also if its rule never deletes. The times select a partition.
PRUNE_BY_RULE = """
CREATE FUNCTION pgoutbox.prune_by_rule(
    rule_topic text, rule_state text, since timestamptz, until timestamptz, at_most bigint
)
RETURNS SETOF text
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
LOCK TABLE pgoutbox.retention IN SHARE MODE;
WITH old AS MATERIALIZED (
    SELECT m.id, m.finished_at, m.state, m.topic, m.dedupe_key, m.payload IS NULL AS has_large_payload,
        r.state = 'sent' AND r.keep = interval '0' AS keeps_dedupe_key
    FROM pgoutbox.retention AS r
    JOIN pgoutbox.message AS m ON m.state = r.state
    WHERE r.topic = rule_topic
        AND r.state = rule_state
        AND m.state = rule_state -- Without this, each rule would read all partitions.
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at <= now() - r.keep
        AND m.finished_at >= since
        AND m.finished_at < until
        AND (
            m.topic = r.topic
            OR (
                r.topic = '*'
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention AS own WHERE own.topic = m.topic AND own.state = r.state
                )
            )
        )
    LIMIT at_most
    FOR UPDATE OF m SKIP LOCKED
)DELETE_OLD""".replace("DELETE_OLD", _DELETE_OLD)

# The functions below delete unneeded keys from one page of their table, in the order of the primary key, and return the
# end of the page. Their cost depends on the size of the page, not on the size of the table. Each check of a key is a
# scalar subquery, because the planner could turn an EXISTS into a hash of all messages. Sequential scans are off, so
# that no small partition is read as a whole, once for each key.

# Keys whose message is deleted, by their own rule. No other message can take over such a key, so it is unchanged when
# it is locked. Topics begin with a letter, so a brace sorts after all of them.
_DEDUPE_PAGE = """WITH page AS MATERIALIZED (
    SELECT d.topic, d.dedupe_key, d.message_id
    FROM pgoutbox.dedupe AS d
    WHERE (d.topic, d.dedupe_key) > (after_topic, after_key)
        AND d.topic >= coalesce(nullif(PAGE_TOPIC, '*'), '')
        AND d.topic <= coalesce(nullif(PAGE_TOPIC, '*'), '{')
    ORDER BY d.topic, d.dedupe_key
    LIMIT at_most
), locked AS MATERIALIZED (
    SELECT d.topic, d.dedupe_key
    FROM page AS p
    JOIN pgoutbox.dedupe AS d ON d.topic = p.topic AND d.dedupe_key = p.dedupe_key
    WHERE IS_OLD
        AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.id = p.message_id LIMIT 1) IS NULL
    FOR UPDATE OF d SKIP LOCKED
), forgotten AS (
    DELETE FROM pgoutbox.dedupe AS d
    USING locked AS l
    WHERE d.topic = l.topic AND d.dedupe_key = l.dedupe_key
    RETURNING d.message_id
)
SELECT p.topic, p.dedupe_key, (SELECT count(*) FROM page), (SELECT count(*) FROM forgotten)
FROM page AS p
ORDER BY p.topic DESC, p.dedupe_key DESC
LIMIT 1
$function$
"""

PRUNE_DEDUPE_BY_RULE = """
CREATE FUNCTION pgoutbox.prune_dedupe_by_rule(
    rule_topic text, at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT ''
)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
LOCK TABLE pgoutbox.retention IN SHARE MODE;
DEDUPE_PAGE""".replace("DEDUPE_PAGE", _DEDUPE_PAGE.replace("PAGE_TOPIC", "rule_topic")).replace(
    "IS_OLD",
    """d.created_at <= now() - (
            SELECT r.keep FROM pgoutbox.retention AS r WHERE r.topic = rule_topic AND r.state = 'dedupe_key'
        )
        AND (
            rule_topic <> '*'
            OR NOT EXISTS (
                SELECT FROM pgoutbox.retention AS own WHERE own.topic = d.topic AND own.state = 'dedupe_key'
            )
        )""",
)

# The same by age alone, for a prune without rules.
PRUNE_DEDUPE = """
CREATE FUNCTION pgoutbox.prune_dedupe(
    older_than interval, only_topic text, at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT ''
)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
DEDUPE_PAGE""".replace("DEDUPE_PAGE", _DEDUPE_PAGE.replace("PAGE_TOPIC", "only_topic")).replace(
    "IS_OLD", "d.created_at < now() - older_than"
)

# The head of a coalesce key is unneeded if no message of the key can become pending again or supersede another one:
#
# - No message of the key is live, failed or cancelled. Only these can be delivered or redriven. No index of live
#   messages by key exists, which every enqueue would have to write: the oldest live messages are read instead. If more
#   of them exist than are read, heads that are newer than those stay.
# - The newest message is deleted. While it exists, `resend` and `cancel_by_key` need the head. Without a head `resend`
#   refuses an older message that was sent.
#
# Both come from one snapshot, which contains the newest message of each head in it. The head is locked after that and
# compared: an enqueue that committed in between has changed it. An open enqueue has it locked, so it is passed over.
PRUNE_COALESCE = """
CREATE FUNCTION pgoutbox.prune_coalesce(at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT '')
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
WITH page AS MATERIALIZED (
    SELECT head.topic, head.coalesce_key, head.newest_id
    FROM pgoutbox.coalesce AS head
    WHERE (head.topic, head.coalesce_key) > (after_topic, after_key)
    ORDER BY head.topic, head.coalesce_key
    LIMIT at_most
), ended AS MATERIALIZED (
    SELECT p.topic, p.coalesce_key, p.newest_id
    FROM page AS p
    WHERE (SELECT m.id FROM pgoutbox.message_done AS m WHERE m.id = p.newest_id LIMIT 1) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_done AS m
            WHERE m.topic = p.topic AND m.coalesce_key = p.coalesce_key AND m.state = 'cancelled'
            LIMIT 1
        ) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_failed AS m
            WHERE m.topic = p.topic AND m.coalesce_key = p.coalesce_key
            LIMIT 1
        ) IS NULL
), oldest AS MATERIALIZED (
    SELECT m.id, m.topic, m.coalesce_key
    FROM pgoutbox.message_live AS m
    WHERE m.id <= (SELECT max(e.newest_id) FROM ended AS e)
    ORDER BY m.id
    LIMIT 10 * at_most
), locked AS MATERIALIZED (
    SELECT head.topic, head.coalesce_key
    FROM ended AS e
    JOIN pgoutbox.coalesce AS head ON head.topic = e.topic AND head.coalesce_key = e.coalesce_key
    WHERE head.newest_id = e.newest_id
        AND e.newest_id <= coalesce(
            (SELECT max(o.id) FROM oldest AS o HAVING count(*) = 10 * at_most), e.newest_id
        )
        AND (e.topic, e.coalesce_key) NOT IN (
            SELECT o.topic, o.coalesce_key FROM oldest AS o WHERE o.coalesce_key IS NOT NULL
        )
    FOR UPDATE OF head SKIP LOCKED
), forgotten AS (
    DELETE FROM pgoutbox.coalesce AS head
    USING locked AS l
    WHERE head.topic = l.topic AND head.coalesce_key = l.coalesce_key
    RETURNING head.newest_id
)
SELECT p.topic, p.coalesce_key, (SELECT count(*) FROM page), (SELECT count(*) FROM forgotten)
FROM page AS p
ORDER BY p.topic DESC, p.coalesce_key DESC
LIMIT 1
$function$
"""

# The row of an ordering key makes an enqueue draw its id after the ids of the earlier messages. It is unneeded if none
# of these is live, failed or cancelled: no message waits for a sent or skipped one. The row also stays while its last
# message exists, so that a rarely used key keeps its row.
PRUNE_ORDERING = """
CREATE FUNCTION pgoutbox.prune_ordering(at_most bigint, after_queue text DEFAULT '', after_key text DEFAULT '')
RETURNS TABLE (last_queue text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
WITH page AS MATERIALIZED (
    SELECT tail.queue, tail.ordering_key, tail.last_id
    FROM pgoutbox.ordering AS tail
    WHERE (tail.queue, tail.ordering_key) > (after_queue, after_key)
    ORDER BY tail.queue, tail.ordering_key
    LIMIT at_most
), ended AS MATERIALIZED (
    SELECT p.queue, p.ordering_key, p.last_id
    FROM page AS p
    WHERE (SELECT m.id FROM pgoutbox.message_done AS m WHERE m.id = p.last_id LIMIT 1) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_done AS m
            WHERE m.queue = p.queue AND m.ordering_key = p.ordering_key AND m.state = 'cancelled'
            LIMIT 1
        ) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_failed AS m
            WHERE m.queue = p.queue AND m.ordering_key = p.ordering_key
            LIMIT 1
        ) IS NULL
        AND (
            SELECT m.id
            FROM pgoutbox.message_live AS m
            WHERE m.queue = p.queue AND m.ordering_key = p.ordering_key
            LIMIT 1
        ) IS NULL
), locked AS MATERIALIZED (
    SELECT tail.queue, tail.ordering_key
    FROM ended AS e
    JOIN pgoutbox.ordering AS tail ON tail.queue = e.queue AND tail.ordering_key = e.ordering_key
    WHERE tail.last_id = e.last_id
        AND (SELECT count(*) FROM ended) > 0 -- Producers wait for these locks: look up everything before the first.
    FOR UPDATE OF tail SKIP LOCKED
), forgotten AS (
    DELETE FROM pgoutbox.ordering AS tail
    USING locked AS l
    WHERE tail.queue = l.queue AND tail.ordering_key = l.ordering_key
    RETURNING tail.last_id
)
SELECT p.queue, p.ordering_key, (SELECT count(*) FROM page), (SELECT count(*) FROM forgotten)
FROM page AS p
ORDER BY p.queue DESC, p.ordering_key DESC
LIMIT 1
$function$
"""

# A content is deleted after its last message.
PRUNE_CONTENT = """
CREATE FUNCTION pgoutbox.prune_content(at_most bigint, after_id bigint DEFAULT 0)
RETURNS TABLE (last_id bigint, content_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
WITH page AS MATERIALIZED (
    SELECT c.id
    FROM pgoutbox.content AS c
    WHERE c.id > after_id
    ORDER BY c.id
    LIMIT at_most
), forgotten AS (
    DELETE FROM pgoutbox.content AS c
    USING page AS p
    WHERE c.id = p.id AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.content_id = p.id LIMIT 1) IS NULL
    RETURNING c.id
)
SELECT p.id, (SELECT count(*) FROM page), (SELECT count(*) FROM forgotten)
FROM page AS p
ORDER BY p.id DESC
LIMIT 1
$function$
"""

# --- the roles --------------------------------------------------------------------------------------------------------

# One role for each way of using the outbox, with all grants. If the caller may not create roles, the result names the
# missing ones. Call it again when they exist.
SET_UP_ROLES = """
CREATE FUNCTION pgoutbox.set_up_roles()
RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    missing text[] := '{}';
    wanted text;
BEGIN
    LOCK TABLE pgoutbox.retired IN SHARE ROW EXCLUSIVE MODE; -- Of two concurrent grants one would fail.
    PERFORM pgoutbox.hand_over();
    FOREACH wanted IN ARRAY ARRAY['pgoutbox_producer', 'pgoutbox_worker', 'pgoutbox_operator', 'pgoutbox_viewer'] LOOP
        IF to_regrole(wanted) IS NULL THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
            EXCEPTION
                WHEN insufficient_privilege THEN
                    missing := missing || wanted;
                WHEN duplicate_object OR unique_violation THEN
                    NULL; -- The migration of another database was faster.
            END;
        END IF;
    END LOOP;

    REVOKE ALL ON SCHEMA pgoutbox FROM PUBLIC;
    REVOKE ALL ON ALL TABLES IN SCHEMA pgoutbox FROM PUBLIC;
    REVOKE ALL ON ALL SEQUENCES IN SCHEMA pgoutbox FROM PUBLIC;
    REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgoutbox FROM PUBLIC;

    IF to_regrole('pgoutbox_producer') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA pgoutbox TO pgoutbox_producer;
        GRANT EXECUTE ON FUNCTION
            pgoutbox.enqueue, pgoutbox.enqueue_receipt, pgoutbox.enqueue_many, pgoutbox.enqueue_fanout,
            pgoutbox.cancel, pgoutbox.cancel_by_key
        TO pgoutbox_producer;
    END IF;

    IF to_regrole('pgoutbox_worker') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA pgoutbox TO pgoutbox_worker;
        GRANT EXECUTE ON FUNCTION
            pgoutbox.enqueue, pgoutbox.enqueue_receipt, pgoutbox.enqueue_many, pgoutbox.enqueue_fanout,
            pgoutbox.cancel, pgoutbox.cancel_by_key,
            pgoutbox.schema_version, pgoutbox.permits, pgoutbox.next_permit_at, pgoutbox.tokens_of,
            pgoutbox.in_flight_of, pgoutbox.newer_pending, pgoutbox.lock_newer_pending,
            pgoutbox.has_strict_due, pgoutbox.renewed_until, pgoutbox.is_limited, pgoutbox.take_turn,
            pgoutbox.forget_sent, pgoutbox.redacted_text,
            pgoutbox.prune_by_rule, pgoutbox.prune_dedupe_by_rule, pgoutbox.prune_coalesce, pgoutbox.prune_ordering,
            pgoutbox.prune_content,
            pgoutbox.partitions, pgoutbox.kept_until, pgoutbox.make_partition, pgoutbox.retire_partition,
            pgoutbox.clear_retired
        TO pgoutbox_worker;
        GRANT SELECT ON
            pgoutbox.message, pgoutbox.message_live, pgoutbox.large_payload, pgoutbox.coalesce, pgoutbox.content,
            pgoutbox.queue, pgoutbox.breaker, pgoutbox.retention
        TO pgoutbox_worker;
        GRANT SELECT ON SEQUENCE pgoutbox.message_id_seq TO pgoutbox_worker;
        GRANT SELECT (id, queue, ordering_key, on_failed) ON pgoutbox.message_failed TO pgoutbox_worker;
        GRANT SELECT ON
            pgoutbox.message_view, pgoutbox.queue_view, pgoutbox.breaker_view, pgoutbox.retention_view,
            pgoutbox.pulse_view, pgoutbox.upkeep, pgoutbox.retired
        TO pgoutbox_worker;
        GRANT INSERT (due_at, began_at, worker), UPDATE (due_at, began_at, worker) ON pgoutbox.upkeep
        TO pgoutbox_worker;
        GRANT UPDATE (
            state, attempt_count, max_attempts, available_at, claimed_at, worker, lease_expires_at, finished_at,
            skip_reason, superseded_by, last_error
        ) ON pgoutbox.message TO pgoutbox_worker;
        GRANT UPDATE (lease_expires_at) ON pgoutbox.message_live TO pgoutbox_worker;
        GRANT INSERT ON pgoutbox.attempt TO pgoutbox_worker;
        GRANT SELECT, INSERT, UPDATE, DELETE ON pgoutbox.renewal TO pgoutbox_worker;
        GRANT UPDATE (tokens, tokens_at) ON pgoutbox.queue TO pgoutbox_worker;
        GRANT INSERT, UPDATE, DELETE ON pgoutbox.breaker TO pgoutbox_worker;
    END IF;

    IF to_regrole('pgoutbox_viewer') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA pgoutbox TO pgoutbox_viewer;
        GRANT SELECT ON
            pgoutbox.message_view, pgoutbox.attempt_view, pgoutbox.queue_view, pgoutbox.breaker_view,
            pgoutbox.retention_view, pgoutbox.waiting_view, pgoutbox.pulse_view
        TO pgoutbox_viewer;
        GRANT EXECUTE ON FUNCTION
            pgoutbox.schema_version, pgoutbox.redacted_text, pgoutbox.redacted_json, pgoutbox.tokens_of,
            pgoutbox.done_estimate
        TO pgoutbox_viewer;
    END IF;

    IF to_regrole('pgoutbox_operator') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA pgoutbox TO pgoutbox_operator;
        GRANT SELECT ON
            pgoutbox.message_view, pgoutbox.attempt_view, pgoutbox.queue_view, pgoutbox.breaker_view,
            pgoutbox.retention_view, pgoutbox.waiting_view, pgoutbox.pulse_view
        TO pgoutbox_operator;
        GRANT EXECUTE ON FUNCTION
            pgoutbox.schema_version, pgoutbox.redacted_text, pgoutbox.redacted_json, pgoutbox.tokens_of,
            pgoutbox.done_estimate, pgoutbox.cancel, pgoutbox.cancel_each, pgoutbox.cancel_by_key,
            pgoutbox.redrive, pgoutbox.resend, pgoutbox.prune, pgoutbox.prune_dedupe, pgoutbox.prune_by_rule,
            pgoutbox.prune_dedupe_by_rule,
            pgoutbox.prune_coalesce, pgoutbox.prune_ordering, pgoutbox.prune_content,
            pgoutbox.partitions, pgoutbox.kept_until, pgoutbox.make_partition, pgoutbox.retire_partition,
            pgoutbox.clear_retired
        TO pgoutbox_operator;
        GRANT SELECT ON pgoutbox.retired TO pgoutbox_operator;
        GRANT SELECT (lease_expires_at), DELETE ON pgoutbox.renewal TO pgoutbox_operator;
        GRANT SELECT, INSERT, UPDATE ON pgoutbox.queue TO pgoutbox_operator;
        GRANT SELECT, INSERT, UPDATE, DELETE ON pgoutbox.retention TO pgoutbox_operator;
        GRANT SELECT (key), DELETE ON pgoutbox.breaker TO pgoutbox_operator;
        GRANT SELECT ON pgoutbox.audit TO pgoutbox_operator;
    END IF;
    RETURN missing;
END
$function$
"""

# This also revokes the grants of others to these roles in this schema. A role remains if it is granted to another role,
# or has privileges in another database. An internal error means that such a database is being dropped. The owner
# remains, too: a running enqueue uses its privileges.
TAKE_DOWN_ROLES = """
DO $block$
DECLARE
    known text;
BEGIN
    FOREACH known IN ARRAY ARRAY['pgoutbox_producer', 'pgoutbox_worker', 'pgoutbox_operator', 'pgoutbox_viewer'] LOOP
        CONTINUE WHEN to_regrole(known) IS NULL OR known = current_user;
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA pgoutbox FROM %I', known);
        EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA pgoutbox FROM %I', known);
        EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgoutbox FROM %I', known);
        EXECUTE format('REVOKE ALL ON SCHEMA pgoutbox FROM %I', known);
        IF NOT EXISTS (
            SELECT
            FROM pg_catalog.pg_auth_members AS m
            WHERE m.roleid = to_regrole(known) AND m.member <> current_user::regrole
        ) THEN
            BEGIN
                EXECUTE format('DROP ROLE %I', known);
            EXCEPTION
                WHEN dependent_objects_still_exist OR insufficient_privilege OR undefined_object OR internal_error THEN
                NULL;
            END;
        END IF;
    END LOOP;
END
$block$
"""

SET_UP = """
DO $block$
DECLARE
    missing constant text[] := pgoutbox.set_up_roles();
BEGIN
    IF cardinality(missing) > 0 THEN
        RAISE WARNING USING
            MESSAGE = 'pgoutbox: the migrating role may not create roles: ' || array_to_string(missing, ', '),
            HINT = 'Have somebody who may run: CREATE ROLE ' || array_to_string(missing, ' NOLOGIN; CREATE ROLE ')
                || ' NOLOGIN; and then run as the owner: SELECT pgoutbox.set_up_roles();';
    END IF;
END
$block$
"""

FUNCTIONS = (
    REDACTED_TEXT, REDACTED_JSON, DONE_ESTIMATE, FORGET_SENT, REDRIVE, RESEND, PRUNE, PRUNE_BY_RULE, PRUNE_DEDUPE,
    PRUNE_DEDUPE_BY_RULE, PRUNE_COALESCE, PRUNE_ORDERING, PRUNE_CONTENT, SET_UP_ROLES,
)  # fmt: skip

COMMENTS = {
    "FUNCTION pgoutbox.redacted_text": "A text without the values of names such as password or token.",
    "FUNCTION pgoutbox.redacted_json": "The structure of a JSON value: member names without values.",
    "FUNCTION pgoutbox.done_estimate": "Estimated number of finished messages in each state, by the last ANALYZE.",
    "FUNCTION pgoutbox.forget_sent": "Delete messages as they are sent, if a retention rule deletes them at once and "
    "the attempt is in flight. Returns the ids of the deleted messages.",
    "FUNCTION pgoutbox.redrive": "Make failed and cancelled messages pending again, if they are in one of the states "
    "and, if given, at these attempts. Returns for each message whether it was redriven, its state before, the newer "
    "message if it is superseded, and its attempt count.",
    "FUNCTION pgoutbox.resend": "Enqueue a copy of a sent message. Returns the id of the copy, or null with the state "
    "that prevents a copy or the newer message. If that newer message is deleted, only the state is not null. Returns "
    "no row if the message does not exist.",
    "FUNCTION pgoutbox.prune": "Delete a batch of messages that have been final for longer than an interval, with "
    "attempts, large payloads and dedupe keys. Returns the state of each deleted message.",
    "FUNCTION pgoutbox.prune_by_rule": "Delete a batch of messages that a retention rule no longer keeps and that "
    "ended within a period. Returns the state of each deleted message.",
    "FUNCTION pgoutbox.prune_dedupe": "Delete the old dedupe keys of one page whose message is deleted.",
    "FUNCTION pgoutbox.prune_dedupe_by_rule": "Delete the dedupe keys of one page that their rule no longer keeps.",
    "FUNCTION pgoutbox.prune_coalesce": "Delete the unneeded coalesce keys of one page, in the order of "
    "the primary key. Returns the last key of the page, its number of keys, and the number of deleted keys.",
    "FUNCTION pgoutbox.prune_ordering": "Delete the unneeded ordering keys of one page, in the order of "
    "the primary key. Returns the last key of the page, its number of keys, and the number of deleted keys.",
    "FUNCTION pgoutbox.prune_content": "Delete the contents of one page that no message refers to.",
    "FUNCTION pgoutbox.set_up_roles": "Create the missing roles, if the caller may, and grant the existing ones their "
    "privileges in this database. Returns the roles that are still missing. Idempotent.",
    "VIEW pgoutbox.message_view": "Every message, redacted: payload and headers without values, and texts without the "
    "values of names such as password.",
    "VIEW pgoutbox.attempt_view": "The attempts that did not end as sent, with redacted errors.",
    "VIEW pgoutbox.queue_view": "The queues that have or had a limit or a pause, with their messages in flight.",
    "VIEW pgoutbox.breaker_view": "Open circuit breakers of transports and destinations.",
    "VIEW pgoutbox.retention_view": "How long final messages are kept.",
    "VIEW pgoutbox.waiting_view": "Every pending message with the reason why it is not claimed: paused, scheduled, "
    "retry, breaker, superseded, halted, in order, in flight, rate, max_in_flight, or due if it can be claimed.",
    "VIEW pgoutbox.pulse_view": "Counters of which one changes with nearly every event: for programs that follow the "
    "outbox.",
}

DOWN = (
    "DROP FUNCTION pgoutbox.set_up_roles",
    "DROP FUNCTION pgoutbox.prune_content",
    "DROP FUNCTION pgoutbox.prune_ordering",
    "DROP FUNCTION pgoutbox.prune_coalesce",
    "DROP FUNCTION pgoutbox.prune_dedupe_by_rule",
    "DROP FUNCTION pgoutbox.prune_dedupe",
    "DROP FUNCTION pgoutbox.prune_by_rule",
    "DROP FUNCTION pgoutbox.prune",
    "DROP FUNCTION pgoutbox.resend",
    "DROP FUNCTION pgoutbox.redrive",
    "DROP FUNCTION pgoutbox.forget_sent",
    "DROP FUNCTION pgoutbox.done_estimate",
    *(f"DROP VIEW pgoutbox.{name}" for name in reversed(VIEWS)),
    "DROP FUNCTION pgoutbox.redacted_json",
    "DROP FUNCTION pgoutbox.redacted_text",
)


def upgrade() -> None:
    for statement in (SCHEMA_VERSION, *FUNCTIONS, *VIEWS.values()):
        op.execute(statement)
    for name, comment in COMMENTS.items():
        op.execute(f"COMMENT ON {name} IS '{comment}'")
    op.execute(SET_UP)


def downgrade() -> None:
    op.execute(TAKE_DOWN_ROLES)
    for statement in (*DOWN, FORMER_SCHEMA_VERSION):
        op.execute(statement)
