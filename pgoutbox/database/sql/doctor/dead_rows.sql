-- Tables with more dead than live rows.
SELECT s.relname::text AS name, s.n_live_tup AS live, s.n_dead_tup AS dead, s.last_autovacuum IS NULL AS never
FROM pg_catalog.pg_stat_user_tables AS s
WHERE s.schemaname = 'pgoutbox' AND s.n_dead_tup > %(dead_rows)s::bigint AND s.n_dead_tup > s.n_live_tup
ORDER BY s.n_dead_tup DESC
LIMIT 10
