-- End the pause of a schedule. It goes on with its next time from now on. Returns false if there is none of this name, or it
-- is not paused.
CREATE FUNCTION pgoutbox.resume_schedule(name text)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    UPDATE pgoutbox.schedule AS s
    SET paused_at = NULL, changed_at = now()
    WHERE s.name = resume_schedule.name AND s.paused_at IS NOT NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM pgoutbox._record_act('resume', details => jsonb_build_object('schedule', resume_schedule.name));
    RETURN true;
END
$function$;
