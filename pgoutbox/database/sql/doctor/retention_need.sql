-- The number of retention rules, and the estimated number of finished messages.
SELECT
    (SELECT count(*) FROM pgoutbox.retention_view AS r WHERE r.keep IS NOT NULL) AS rules,
    (
        SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint
        FROM pg_catalog.pg_inherits AS i
        JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'pgoutbox.message_done'::regclass
    ) AS done_estimate
