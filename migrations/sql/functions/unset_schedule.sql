-- Delete a schedule. Messages that it has enqueued stay. Returns false if there is none of this name.
CREATE FUNCTION pgoutbox.unset_schedule(name text)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    DELETE FROM pgoutbox.schedule AS s WHERE s.name = unset_schedule.name;
    RETURN FOUND;
END
$function$;
