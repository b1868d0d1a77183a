-- The privileges of the role, and those of PUBLIC. `enqueue` writes with its owner's privileges, or through
-- `_enqueue_receipt` with that owner's, or else with the role's own.
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
            WHERE f.proname IN ('enqueue', '_enqueue_receipt')
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
