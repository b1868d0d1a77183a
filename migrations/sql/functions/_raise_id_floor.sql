-- Let later enqueues refuse the ids that are drawn until now.
CREATE FUNCTION pgoutbox._raise_id_floor()
RETURNS void
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
UPDATE pgoutbox.id_floor AS f
SET newest_id = greatest(f.newest_id, (SELECT s.last_value FROM pgoutbox.message_id_seq AS s WHERE s.is_called))
$function$;
