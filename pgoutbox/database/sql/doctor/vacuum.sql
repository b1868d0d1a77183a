-- Whether autovacuum runs, and the tables without it.
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
