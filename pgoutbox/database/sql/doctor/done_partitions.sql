-- The partitions of finished messages: their number, the end of the last one, and the first time without a partition.
-- After a wrong clock, partitions may exist far ahead, so the end of the last one does not count.
WITH dated AS MATERIALIZED (SELECT p.lower_at, p.upper_at FROM pgoutbox.partitions() AS p)
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
