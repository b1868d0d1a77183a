-- Facts about the server, from the catalog alone, so that this also works for a role without privileges in the schema.
SELECT
    current_setting('server_version_num')::integer AS server_version,
    current_setting('server_version') AS version_text,
    pg_is_in_recovery() AS in_recovery,
    current_setting('default_transaction_read_only')::boolean AS read_only,
    current_setting('server_encoding') AS encoding,
    n.oid IS NOT NULL AS has_schema,
    coalesce(has_schema_privilege(n.oid, 'USAGE'), false) AS may_use_schema,
    EXISTS (
        SELECT FROM pg_catalog.pg_proc AS p WHERE p.pronamespace = n.oid AND p.proname = '_require_package'
    ) AS has_version,
    current_user::text AS role
FROM (VALUES (1)) AS always(one)
LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = 'pgoutbox'
