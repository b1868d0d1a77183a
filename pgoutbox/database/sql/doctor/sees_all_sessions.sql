-- Whether this role sees the sessions of other roles.
SELECT pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all
