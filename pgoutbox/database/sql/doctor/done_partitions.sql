-- The partitions of finished messages: their number, the end of the last one, and the first time without a partition.
-- After a wrong clock, partitions may exist far ahead, so the end of the last one does not count.
WITH dated AS MATERIALIZED (
    -- The bounds of a partition are read in the session's time format, which prepare_operation.sql has set.
    SELECT bounds[1]::timestamptz AS lower_at, bounds[2]::timestamptz AS upper_at
    FROM pg_catalog.pg_inherits AS i
    JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
    CROSS JOIN LATERAL regexp_match(
        pg_get_expr(c.relpartbound, c.oid), $pattern$FROM \('([^']+)'\) TO \('([^']+)'\)$$pattern$
    ) AS bounds
    WHERE i.inhparent = 'pgoutbox.message_done'::regclass AND bounds IS NOT NULL
)
SELECT
    (SELECT count(*) FROM dated) AS dated,
    (SELECT extract(epoch FROM max(d.upper_at) - now())::float8 FROM dated AS d) AS last_seconds,
    extract(epoch FROM min(covered.until) - now())::float8 AS ahead_seconds
FROM (
    SELECT now() AS until
    UNION ALL
    SELECT d.upper_at
    FROM dated AS d
    WHERE d.upper_at > now()
) AS covered
WHERE NOT EXISTS (SELECT FROM dated AS d WHERE d.lower_at <= covered.until AND d.upper_at > covered.until)
