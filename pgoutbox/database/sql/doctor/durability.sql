-- Settings and tables with which a committed message can be lost. An application may also change these settings for its
-- own sessions; other sessions cannot see that.
SELECT
    current_setting('fsync') = 'on' AS fsync,
    current_setting('full_page_writes') = 'on' AS full_page_writes,
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
