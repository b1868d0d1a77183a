-- Enqueue the message of a schedule now, beside its times, also in a pause. Returns its id, or null if there is no schedule of
-- this name.
CREATE FUNCTION pgoutbox.run_schedule(name text)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    message_id bigint;
BEGIN
    SELECT e.id INTO message_id
    FROM pgoutbox.schedule AS s
    CROSS JOIN pgoutbox.enqueue_many(jsonb_build_array(s.message || jsonb_build_object(
        'headers', coalesce(nullif(s.message -> 'headers', 'null'), '{}') || jsonb_build_object('schedule', s.name)
    ))) AS e
    WHERE s.name = run_schedule.name;
    IF message_id IS NOT NULL THEN
        PERFORM pgoutbox._record_act(
            'run', ARRAY[message_id], details => jsonb_build_object('schedule', run_schedule.name)
        );
    END IF;
    RETURN message_id;
END
$function$;
