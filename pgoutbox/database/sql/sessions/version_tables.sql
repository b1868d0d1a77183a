-- Alembic's version tables, whatever their names: that of `pgoutbox migrate`, and those of applications.
SELECT
    n.nspname,
    c.relname,
    quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS title,
    has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') AS is_readable
FROM pg_catalog.pg_attribute AS a
JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid AND c.relkind = 'r' AND c.relpersistence <> 't'
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE a.attname = 'version_num' AND a.atttypid = 'varchar'::regtype AND NOT a.attisdropped
ORDER BY n.nspname, c.relname
