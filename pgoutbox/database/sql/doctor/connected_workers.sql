-- The number of connected workers that this role may see: it does not see the application name of other roles'
-- sessions. A worker with leases is running, see lease_holding_workers.sql.
SELECT
    count(DISTINCT a.application_name) FILTER (WHERE starts_with(a.application_name, 'pgoutbox claim ')) AS workers,
    pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all
FROM pg_catalog.pg_stat_activity AS a
WHERE a.datname = current_database()
