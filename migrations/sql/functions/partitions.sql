-- The partitions of message_done and their times, without the default one.
--
-- This function and make_partition read and write times as text. UTC and ISO are the only unambiguous choice.
CREATE FUNCTION pgoutbox.partitions()
RETURNS TABLE (name text, lower_at timestamptz, upper_at timestamptz)
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $function$
    SELECT c.relname::text, bounds[1]::timestamptz, bounds[2]::timestamptz
    FROM pg_inherits AS i
    JOIN pg_class AS c ON c.oid = i.inhrelid
    CROSS JOIN LATERAL regexp_match(
        pg_get_expr(c.relpartbound, c.oid), $pattern$^FOR VALUES FROM \('([^']+)'\) TO \('([^']+)'\)$$pattern$
    ) AS bounds
    WHERE i.inhparent = 'pgoutbox.message_done'::regclass AND bounds IS NOT NULL
    ORDER BY bounds[1]::timestamptz
$function$;
