"""The queries of the doctor. Every statement is read-only, and reads a bounded number of messages.

Messages are read from the views, which all roles except producers may read. Only payloads are read from the tables,
because no view shows them. Without these privileges a check reports the missing grant.
"""

from typing import Final, LiteralString

from pgoutbox.database.sql.sessions import TRANSACTION_FORMATS

# Local to the transaction, so that the settings do not stay in a pooler's session. A slow check is cancelled, so that
# it adds no load to a server in trouble.
PREPARE_EXAMINATION: Final[LiteralString] = (
    """
SELECT"""
    + TRANSACTION_FORMATS
    + """
    set_config('statement_timeout', %(seconds)s::text || 's', true),
    set_config('lock_timeout', '1s', true),
    set_config('idle_in_transaction_session_timeout', '60s', true),
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', true)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', true)
"""
)

# From the catalog alone, so that it also works for a role without privileges in the schema.
EXAMINED_SERVER: Final[LiteralString] = """
SELECT
    current_setting('server_version_num')::integer AS server_version,
    current_setting('server_version') AS version_text,
    pg_is_in_recovery() AS in_recovery,
    current_setting('default_transaction_read_only')::boolean AS read_only,
    current_setting('server_encoding') AS encoding,
    n.oid IS NOT NULL AS has_schema,
    coalesce(has_schema_privilege(n.oid, 'USAGE'), false) AS may_use_schema,
    EXISTS (
        SELECT FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = n.oid AND p.proname = 'schema_version'
    ) AS has_version,
    current_user::text AS role
FROM (VALUES (1)) AS always(one)
LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = 'pgoutbox'
"""

MISSING_RELATIONS: Final[LiteralString] = """
SELECT needed.name
FROM unnest(
    ARRAY[
        'attempt', 'attempt_view', 'audit', 'breaker', 'breaker_view', 'coalesce', 'content', 'dedupe',
        'large_payload', 'message', 'message_done', 'message_done_default', 'message_failed', 'message_id_seq',
        'message_live', 'message_view', 'ordering', 'pulse_view', 'queue', 'queue_view', 'renewal', 'retention',
        'retention_view', 'retired', 'upkeep', 'waiting_view'
    ]
) AS needed(name)
WHERE NOT EXISTS (
    SELECT
    FROM pg_catalog.pg_class AS c
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = 'pgoutbox' AND c.relname = needed.name
)
ORDER BY needed.name
"""

# The privileges of the role, and those of PUBLIC. `enqueue` writes with its owner's privileges, or through
# `enqueue_receipt` with that owner's, or else with the role's own.
RIGHTS: Final[LiteralString] = """
WITH schema AS (
    SELECT n.oid, has_schema_privilege(n.oid, 'USAGE') AS may_use
    FROM pg_catalog.pg_namespace AS n
    WHERE n.nspname = 'pgoutbox'
), relation AS (
    SELECT c.oid, c.relname, c.relkind
    FROM pg_catalog.pg_class AS c
    JOIN schema AS s ON s.oid = c.relnamespace
), function AS (
    SELECT p.oid, p.proname, p.prosecdef
    FROM pg_catalog.pg_proc AS p
    JOIN schema AS s ON s.oid = p.pronamespace
)
SELECT
    r.rolsuper AS is_superuser,
    s.may_use AND coalesce(
        (
            SELECT
                bool_and(has_function_privilege(f.oid, 'EXECUTE')) FILTER (WHERE f.proname = 'enqueue')
                AND (
                    bool_or(f.prosecdef AND has_function_privilege(f.oid, 'EXECUTE'))
                    OR (SELECT has_table_privilege(t.oid, 'INSERT') FROM relation AS t WHERE t.relname = 'message_live')
                )
            FROM function AS f
            WHERE f.proname IN ('enqueue', 'enqueue_receipt')
        ),
        false
    ) AS may_enqueue,
    s.may_use AND coalesce(
        (
            SELECT bool_and(
                CASE t.relname
                    WHEN 'message' THEN
                        has_any_column_privilege(t.oid, 'SELECT') AND has_any_column_privilege(t.oid, 'UPDATE')
                    ELSE has_table_privilege(t.oid, 'INSERT')
                END
            )
            FROM relation AS t
            WHERE t.relname IN ('message', 'attempt')
        ),
        false
    ) AS may_work,
    s.may_use AND coalesce(
        (SELECT bool_and(has_function_privilege(f.oid, 'EXECUTE')) FROM function AS f WHERE f.proname = 'redrive'),
        false
    ) AS may_operate,
    s.may_use AND coalesce(
        (
            SELECT bool_or(has_any_column_privilege(t.oid, 'SELECT'))
            FROM relation AS t
            WHERE t.relname IN ('message', 'message_view')
        ),
        false
    ) AS may_look,
    has_schema_privilege('public', s.oid, 'CREATE') AS public_may_create,
    ARRAY(
        SELECT t.relname::text
        FROM relation AS t
        WHERE t.relkind IN ('r', 'p', 'v')
            AND (
                has_any_column_privilege('public', t.oid, 'SELECT, INSERT, UPDATE')
                OR has_table_privilege('public', t.oid, 'DELETE, TRUNCATE')
            )
        ORDER BY t.relname
    ) AS public_tables,
    ARRAY(
        SELECT DISTINCT f.proname::text FROM function AS f WHERE has_function_privilege('public', f.oid, 'EXECUTE')
        ORDER BY 1
    ) AS public_functions,
    ARRAY(
        SELECT g.rolname::text
        FROM pg_catalog.pg_roles AS g
        WHERE g.rolname IN ('pgoutbox_producer', 'pgoutbox_worker', 'pgoutbox_operator', 'pgoutbox_viewer')
            AND NOT r.rolsuper
            AND pg_has_role(g.oid, 'USAGE')
        ORDER BY g.rolname
    ) AS granted_roles
FROM schema AS s
CROSS JOIN pg_catalog.pg_roles AS r
WHERE r.rolname = current_user
"""

# An application may also change these settings for its own sessions; other sessions cannot see that.
DURABILITY: Final[LiteralString] = """
SELECT
    current_setting('fsync') = 'on' AS has_fsync,
    current_setting('full_page_writes') = 'on' AS has_full_pages,
    current_setting('synchronous_commit') <> 'off' AS commits_wait,
    ARRAY(
        SELECT coalesce('role ' || r.rolname, 'database ' || d.datname, 'all roles')
        FROM pg_catalog.pg_db_role_setting AS s
        LEFT JOIN pg_catalog.pg_roles AS r ON r.oid = s.setrole
        LEFT JOIN pg_catalog.pg_database AS d ON d.oid = s.setdatabase
        WHERE 'synchronous_commit=off' = ANY (s.setconfig)
            AND (s.setdatabase = 0 OR d.datname = current_database())
        ORDER BY 1
        LIMIT 10
    ) AS hasty,
    ARRAY(
        SELECT c.relname::text
        FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = to_regnamespace('pgoutbox') AND c.relkind = 'r' AND c.relpersistence = 'u'
        ORDER BY c.relname
        LIMIT 10
    ) AS unlogged
"""

# The snapshot is older than the value of the sequence, so an id that is being enqueued is never ahead of it.
ID_SEQUENCE: Final[LiteralString] = """
SELECT
    p.last_id,
    (SELECT max(m.id) FROM pgoutbox.message_view AS m) AS newest_id,
    s.seqcache AS cache_size
FROM pgoutbox.pulse_view AS p
CROSS JOIN pg_catalog.pg_sequence AS s
WHERE s.seqrelid = 'pgoutbox.message_id_seq'::regclass
"""

VACUUM: Final[LiteralString] = """
SELECT
    current_setting('autovacuum') = 'on' AND current_setting('track_counts') = 'on' AS has_autovacuum,
    ARRAY(
        SELECT c.relname::text
        FROM pg_catalog.pg_class AS c
        CROSS JOIN LATERAL pg_options_to_table(c.reloptions) AS o
        WHERE c.relnamespace = to_regnamespace('pgoutbox')
            AND c.relkind = 'r'
            AND o.option_name = 'autovacuum_enabled'
            AND NOT o.option_value::boolean
        ORDER BY c.relname
        LIMIT 10
    ) AS without_autovacuum
"""

DEAD_ROWS: Final[LiteralString] = """
SELECT s.relname::text AS name, s.n_live_tup AS live, s.n_dead_tup AS dead, s.last_autovacuum IS NULL AS never
FROM pg_catalog.pg_stat_user_tables AS s
WHERE s.schemaname = 'pgoutbox' AND s.n_dead_tup > %(dead_rows)s::bigint AND s.n_dead_tup > s.n_live_tup
ORDER BY s.n_dead_tup DESC
LIMIT 10
"""

# The holders of old row versions in the whole server: sessions, prepared transactions, slots, standbys.
XMIN_HOLDERS: Final[LiteralString] = """
SELECT held.kind, held.name, held.detail, held.age_seconds, held.transactions
FROM (
    SELECT
        'session' AS kind,
        a.pid::text AS name,
        concat_ws(
            ', ',
            'user ' || coalesce(a.usename, '(none)'),
            'application ' || nullif(a.application_name, ''),
            coalesce(a.state, a.backend_type)
        ) AS detail,
        extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS age_seconds,
        age(coalesce(a.backend_xmin, a.backend_xid))::bigint AS transactions
    FROM pg_catalog.pg_stat_activity AS a
    WHERE coalesce(a.backend_xmin, a.backend_xid) IS NOT NULL
        AND a.backend_type <> 'autovacuum worker'
        AND a.pid <> pg_backend_pid()
        AND a.xact_start <= clock_timestamp() - make_interval(secs => %(seconds)s::float8)
    UNION ALL
    SELECT
        'prepared',
        p.gid,
        'of ' || p.owner || ' in database ' || p.database,
        extract(epoch FROM clock_timestamp() - p.prepared)::float8,
        age(p.transaction)::bigint
    FROM pg_catalog.pg_prepared_xacts AS p
    WHERE p.prepared <= clock_timestamp() - make_interval(secs => %(seconds)s::float8)
    UNION ALL
    SELECT
        'slot',
        s.slot_name::text,
        CASE WHEN s.active THEN 'in use' ELSE 'unused' END,
        NULL,
        age(s.xmin)::bigint
    FROM pg_catalog.pg_replication_slots AS s
    WHERE s.xmin IS NOT NULL AND age(s.xmin) >= %(transactions)s::bigint
    UNION ALL
    SELECT
        'standby',
        coalesce(nullif(r.application_name, ''), r.pid::text),
        'with hot_standby_feedback',
        NULL,
        age(r.backend_xmin)::bigint
    FROM pg_catalog.pg_stat_replication AS r
    WHERE r.backend_xmin IS NOT NULL AND age(r.backend_xmin) >= %(transactions)s::bigint
) AS held
ORDER BY held.transactions DESC
LIMIT 10
"""

SEES_ALL_SESSIONS: Final[LiteralString] = "SELECT pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all"

# A standby has no write position.
SLOTS: Final[LiteralString] = """
SELECT s.slot_name::text AS name, s.active AS is_active, s.wal_status, retained.bytes
FROM pg_catalog.pg_replication_slots AS s
CROSS JOIN LATERAL (
    SELECT pg_wal_lsn_diff(
        CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
        s.restart_lsn
    )::bigint AS bytes
) AS retained
WHERE retained.bytes >= %(bytes)s::bigint OR s.wal_status IN ('unreserved', 'lost')
ORDER BY retained.bytes DESC NULLS LAST
LIMIT 10
"""

# A bell is the advisory lock of a queue. Listeners hold it exclusively, and enqueuing transactions share it until they
# end. Any other holder, and a shared lock without a transaction, is an error.
FOREIGN_BELL_HOLDERS: Final[LiteralString] = """
SELECT
    concat_ws(
        ', ',
        'process ' || l.pid,
        'user ' || a.usename,
        'application ' || nullif(a.application_name, '')
    ) AS name,
    l.pid,
    bool_or(l.mode = 'ShareLock') AS is_shared
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_database AS d ON d.oid = l.database AND d.datname = current_database()
LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory'
    AND l.classid = 1885826146
    AND l.objsubid = 2
    AND l.granted
    AND a.application_name IS DISTINCT FROM 'pgoutbox listen'
    AND (l.mode = 'ExclusiveLock' OR a.state = 'idle')
GROUP BY l.pid, a.usename, a.application_name
ORDER BY l.pid
LIMIT 10
"""

NOTIFY_QUEUE_USAGE: Final[LiteralString] = "SELECT pg_notification_queue_usage()::float8 AS usage"

SERVER_CLOCK: Final[LiteralString] = "SELECT extract(epoch FROM clock_timestamp())::float8 AS seconds"

# Not the worker's channel, so that no worker is woken.
LISTEN_FOR_ITSELF: Final[LiteralString] = "LISTEN pgoutbox_doctor"
NOTIFY_ITSELF: Final[LiteralString] = "SELECT pg_notify('pgoutbox_doctor', %(payload)s::text)"

# The bounds of a partition are read in the session's time format. After a wrong clock, partitions may exist far ahead,
# so the end of the last one is not relevant: the first time without a partition counts.
DONE_PARTITIONS: Final[LiteralString] = """
WITH dated AS MATERIALIZED (
    SELECT bounds[1]::timestamptz AS lower_at, bounds[2]::timestamptz AS upper_at
    FROM pg_catalog.pg_inherits AS i
    JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
    CROSS JOIN LATERAL regexp_match(
        pg_get_expr(c.relpartbound, c.oid), 'FROM \\(''([^'']+)''\\) TO \\(''([^'']+)''\\)$'
    ) AS bounds
    WHERE i.inhparent = 'pgoutbox.message_done'::regclass AND bounds IS NOT NULL
)
SELECT
    (SELECT count(*) FROM dated) AS dated,
    (SELECT extract(epoch FROM max(d.upper_at) - now())::float8 FROM dated AS d) AS last_seconds,
    extract(epoch FROM min(covered.until) - now())::float8 AS ahead_seconds
FROM (
    SELECT now() AS until
    UNION ALL
    SELECT d.upper_at
    FROM dated AS d
    WHERE d.upper_at > now()
) AS covered
WHERE NOT EXISTS (SELECT FROM dated AS d WHERE d.lower_at <= covered.until AND d.upper_at > covered.until)
"""

# Rules that should have deleted messages long ago, each with one such message.
OVERDUE_RETENTION: Final[LiteralString] = """
SELECT r.topic, r.state, extract(epoch FROM now() - old.finished_at - r.keep)::float8 AS overdue_seconds
FROM pgoutbox.retention_view AS r
CROSS JOIN LATERAL (
    SELECT m.finished_at
    FROM pgoutbox.message_view AS m
    WHERE m.state = r.state
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at < now() - r.keep - make_interval(secs => %(seconds)s::float8)
        AND (
            m.topic = r.topic
            OR (
                r.topic = '*'
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention_view AS own WHERE own.topic = m.topic AND own.state = m.state
                )
            )
        )
    LIMIT 1
) AS old
WHERE r.keep IS NOT NULL
ORDER BY r.topic, r.state
LIMIT 20
"""

RETENTION_NEED: Final[LiteralString] = """
SELECT
    (SELECT count(*) FROM pgoutbox.retention_view AS r WHERE r.keep IS NOT NULL) AS rules,
    (
        SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint
        FROM pg_catalog.pg_inherits AS i
        JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'pgoutbox.message_done'::regclass
    ) AS done_estimate
"""

# Pending messages, by topic and scheme of the destination.
PENDING_TOPICS: Final[LiteralString] = """
SELECT
    m.topic,
    CASE WHEN strpos(m.destination, ':') > 0 THEN lower(split_part(m.destination, ':', 1)) END AS scheme,
    count(*) AS messages
FROM (
    SELECT live.topic, live.destination
    FROM pgoutbox.message_view AS live
    WHERE live.state = 'pending'
    LIMIT 100000
) AS m
GROUP BY 1, 2
ORDER BY 1, 2
LIMIT 1000
"""

# These messages may wait for a missing key. Encrypted payloads can be large, so only few are read.
SEALED_PAYLOADS: Final[LiteralString] = """
SELECT m.topic, m.payload
FROM (
    SELECT live.topic, coalesce(live.payload, large.body) AS payload
    FROM pgoutbox.message AS live
    LEFT JOIN pgoutbox.large_payload AS large ON large.message_id = live.id
    WHERE live.state = 'pending'
    LIMIT 1000
) AS m
WHERE jsonb_typeof(m.payload) = 'object' AND m.payload ? %(member)s::text
LIMIT 100
"""

# The same for roles that may not read payloads: the views only show that a payload is encrypted.
SEALED_TOPICS: Final[LiteralString] = """
SELECT m.topic, count(*) AS messages
FROM (
    SELECT live.topic, live.payload
    FROM pgoutbox.message_view AS live
    WHERE live.state = 'pending'
    LIMIT 1000
) AS m
WHERE jsonb_typeof(m.payload) = 'object' AND m.payload ? %(member)s::text
GROUP BY m.topic
ORDER BY m.topic
LIMIT 100
"""

# The duration of the last sent attempts, from claim to end.
HANDLER_SECONDS: Final[LiteralString] = """
SELECT
    m.topic,
    count(*) AS attempts,
    percentile_cont(0.99) WITHIN GROUP (
        ORDER BY extract(epoch FROM m.finished_at - m.claimed_at)::float8
    ) AS p99_seconds
FROM (
    SELECT done.topic, done.finished_at, done.claimed_at
    FROM pgoutbox.message_view AS done
    WHERE done.state = 'sent'
    ORDER BY done.id DESC
    LIMIT 20000
) AS m
WHERE m.finished_at > now() - interval '1 day'
GROUP BY m.topic
HAVING count(*) >= %(attempts)s::bigint
ORDER BY m.topic
LIMIT 100
"""

LONG_IN_FLIGHT: Final[LiteralString] = """
SELECT
    m.topic,
    count(*) AS messages,
    min(m.id) AS first_id,
    max(extract(epoch FROM now() - m.claimed_at)::float8) AS longest_seconds
FROM pgoutbox.message_view AS m
WHERE m.state = 'sending'
    AND m.lease_expires_at > now()
    AND m.claimed_at < now() - make_interval(secs => %(seconds)s::float8)
GROUP BY m.topic
ORDER BY m.topic
LIMIT 100
"""

# The view redacts an error each time that it is read, so only the reported errors are read.
FAILING_TOPICS: Final[LiteralString] = """
WITH counted AS MATERIALIZED (
    SELECT
        m.topic,
        count(*) AS failed,
        count(*) FILTER (WHERE m.finished_at > now() - interval '1 day') AS today,
        count(*) FILTER (
            WHERE m.finished_at BETWEEN now() - interval '2 days' AND now() - interval '1 day'
        ) AS yesterday,
        (array_agg(m.id ORDER BY m.finished_at DESC))[1] AS last_id
    FROM (
        SELECT held.id, held.topic, held.finished_at
        FROM pgoutbox.message_view AS held
        WHERE held.state = 'failed'
        LIMIT 100000
    ) AS m
    GROUP BY m.topic
    ORDER BY today DESC, m.topic
    LIMIT 20
)
SELECT c.topic, c.failed, c.today, c.yesterday, last.error AS last_error
FROM counted AS c
LEFT JOIN LATERAL (
    SELECT left(f.last_error, 300) AS error
    FROM pgoutbox.message_view AS f
    WHERE f.state = 'failed' AND f.id = c.last_id
    LIMIT 1
) AS last ON true
ORDER BY c.today DESC, c.topic
"""

# Messages that have been due for long, by queue, with the possible reasons.
DUE_FOR_LONG: Final[LiteralString] = """
WITH late AS (
    SELECT
        m.queue,
        m.topic,
        m.available_at,
        m.ordering_key IS NOT NULL AND EXISTS (
            SELECT
            FROM pgoutbox.message_view AS f
            WHERE f.state = 'failed'
                AND f.queue = m.queue
                AND f.ordering_key = m.ordering_key
                AND f.on_failed = 'halt'
                AND f.id < m.id
        ) AS is_halted,
        m.ordering_key IS NOT NULL AND EXISTS (
            SELECT
            FROM pgoutbox.message_view AS earlier
            WHERE earlier.state IN ('pending', 'sending')
                AND earlier.queue = m.queue
                AND earlier.ordering_key = m.ordering_key
                AND earlier.id < m.id
        ) AS is_behind
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'pending' AND m.available_at < now() - make_interval(secs => %(seconds)s::float8)
    LIMIT 10000
), counted AS (
    SELECT
        l.queue,
        count(*) AS messages,
        extract(epoch FROM now() - min(l.available_at))::float8 AS oldest_seconds,
        coalesce(array_agg(DISTINCT l.topic) FILTER (WHERE NOT l.is_halted AND NOT l.is_behind), '{}') AS topics,
        count(*) FILTER (WHERE l.is_halted) AS halted,
        count(*) FILTER (WHERE NOT l.is_halted AND NOT l.is_behind) AS free
    FROM late AS l
    GROUP BY l.queue
)
SELECT
    c.queue,
    c.messages,
    c.oldest_seconds,
    c.topics,
    c.halted,
    c.free,
    q.is_paused,
    q.rate_count,
    q.rate_seconds,
    EXISTS (
        SELECT
        FROM pgoutbox.message_view AS held
        WHERE held.state = 'sending' AND held.queue = c.queue AND held.lease_expires_at > now()
    ) AS is_worked,
    q.tokens,
    q.max_in_flight,
    CASE WHEN q.max_in_flight IS NOT NULL THEN q.in_flight END AS in_flight
FROM counted AS c
LEFT JOIN pgoutbox.queue_view AS q ON q.name = c.queue
ORDER BY c.queue
LIMIT 50
"""

OPEN_BREAKERS: Final[LiteralString] = """
SELECT
    b.key,
    extract(epoch FROM now() - b.opened_at)::float8 AS open_seconds,
    left(b.last_error, 300) AS last_error
FROM pgoutbox.breaker_view AS b
ORDER BY b.opened_at
LIMIT 20
"""

# The connections of workers that this role may see: it does not see the application name of other roles' sessions. A
# worker with leases is running.
CONNECTED_WORKERS: Final[LiteralString] = """
SELECT
    count(DISTINCT a.application_name) FILTER (WHERE starts_with(a.application_name, 'pgoutbox claim ')) AS workers,
    pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all
FROM pg_catalog.pg_stat_activity AS a
WHERE a.datname = current_database()
"""

LEASE_HOLDING_WORKERS: Final[LiteralString] = """
SELECT count(DISTINCT held.worker) AS workers
FROM (
    SELECT m.worker
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'sending' AND m.lease_expires_at > now()
    LIMIT 10000
) AS held
"""
