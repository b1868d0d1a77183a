-- The holders of old row versions in the whole server: sessions, prepared transactions, slots, standbys. VACUUM cannot
-- remove dead rows that are newer.
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
        'prepared-transaction',
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
