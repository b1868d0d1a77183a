-- Let the times of a schedule pass, until resume_schedule. Returns false if there is none of this name, or it is paused.
CREATE FUNCTION pgoutbox.pause_schedule(name text)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    UPDATE pgoutbox.schedule AS s
    SET paused_at = now(), next_at = NULL, problem = NULL, retry_at = NULL
    WHERE s.name = pause_schedule.name AND s.paused_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM pgoutbox._record_act('pause', details => jsonb_build_object('schedule', pause_schedule.name));
    RETURN true;
END
$function$;
