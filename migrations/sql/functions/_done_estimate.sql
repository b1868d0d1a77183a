-- Estimated number of finished messages in each state, by the last ANALYZE. PostgreSQL shows the statistics of a column
-- only to roles that may read it, even through a view: hence a function.
CREATE FUNCTION pgoutbox._done_estimate()
RETURNS TABLE (state text, messages bigint)
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT common.state, sum(c.reltuples * common.share)::bigint
FROM pg_partition_tree('pgoutbox.message_done') AS part
JOIN pg_class AS c ON c.oid = part.relid
JOIN pg_stats AS s ON s.schemaname = 'pgoutbox' AND s.tablename = c.relname AND s.attname = 'state'
CROSS JOIN LATERAL unnest(s.most_common_vals::text::text[], s.most_common_freqs) AS common(state, share)
WHERE part.isleaf AND c.reltuples > 0
GROUP BY common.state
$function$;
