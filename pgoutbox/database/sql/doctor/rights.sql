-- The privileges of the role, and those of PUBLIC. `enqueue` writes with its owner's privileges, or through
-- `_enqueue_receipt` with that owner's, or else with the role's own.
SELECT
    r.rolsuper AS is_superuser,
    s.may_use AND functions.may_call_enqueue AND (functions.may_write_as_owner OR tables.may_write) AS may_enqueue,
    s.may_use AND tables.may_work AS may_work,
    s.may_use AND functions.may_redrive AS may_operate,
    s.may_use AND tables.may_look AS may_look,
    has_schema_privilege('public', s.oid, 'CREATE') AS public_may_create,
    tables.public_tables,
    functions.public_functions,
    ARRAY(
        SELECT g.rolname::text
        FROM pg_catalog.pg_roles AS g
        WHERE g.rolname IN ('pgoutbox_producer', 'pgoutbox_worker', 'pgoutbox_operator', 'pgoutbox_viewer')
            AND NOT r.rolsuper
            AND pg_has_role(g.oid, 'USAGE')
        ORDER BY g.rolname
    ) AS granted_roles
FROM (
    SELECT n.oid, has_schema_privilege(n.oid, 'USAGE') AS may_use
    FROM pg_catalog.pg_namespace AS n
    WHERE n.nspname = 'pgoutbox'
) AS s
CROSS JOIN LATERAL (
    -- FILTER instead of names as arguments: a name that does not exist would be an error.
    SELECT
        bool_or(has_table_privilege(t.oid, 'INSERT')) FILTER (WHERE t.relname = 'message_live') IS TRUE AS may_write,
        bool_and(has_any_column_privilege(t.oid, 'SELECT') AND has_any_column_privilege(t.oid, 'UPDATE'))
            FILTER (WHERE t.relname = 'message') IS TRUE
            AND bool_and(has_table_privilege(t.oid, 'INSERT')) FILTER (WHERE t.relname = 'claim') IS TRUE
            AS may_work,
        bool_or(has_any_column_privilege(t.oid, 'SELECT'))
            FILTER (WHERE t.relname IN ('message', 'message_view')) IS TRUE AS may_look,
        coalesce(
            array_agg(t.relname::text ORDER BY t.relname) FILTER (WHERE t.relkind IN ('r', 'p', 'v') AND (
                has_any_column_privilege('public', t.oid, 'SELECT, INSERT, UPDATE')
                OR has_table_privilege('public', t.oid, 'DELETE, TRUNCATE')
            )),
            '{}'
        ) AS public_tables
    FROM pg_catalog.pg_class AS t
    WHERE t.relnamespace = s.oid
) AS tables
CROSS JOIN LATERAL (
    SELECT
        bool_and(f.may_call) FILTER (WHERE f.proname = 'enqueue') IS TRUE AS may_call_enqueue,
        bool_or(f.may_call) FILTER (WHERE f.prosecdef AND f.proname IN ('enqueue', '_enqueue_receipt')) IS TRUE
            AS may_write_as_owner,
        bool_and(f.may_call) FILTER (WHERE f.proname = 'redrive') IS TRUE AS may_redrive,
        coalesce(
            array_agg(DISTINCT f.proname::text) FILTER (WHERE has_function_privilege('public', f.oid, 'EXECUTE')), '{}'
        ) AS public_functions
    FROM (SELECT p.*, has_function_privilege(p.oid, 'EXECUTE') AS may_call FROM pg_catalog.pg_proc AS p) AS f
    WHERE f.pronamespace = s.oid
) AS functions
CROSS JOIN pg_catalog.pg_roles AS r
WHERE r.rolname = current_user
