-- Let no worker claim messages of a topic, in any queue, for a time or until resume_topic. Attempts in flight continue.
-- A second pause keeps the first start and sets the new end.
CREATE FUNCTION pgoutbox.pause_topic(topic text, duration interval DEFAULT NULL)
RETURNS TABLE (paused_at timestamptz, resume_at timestamptz)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC' -- The details of the act do not depend on the session.
AS $function$
#variable_conflict use_column
DECLARE
    problem constant text := coalesce(
        pgoutbox._draft_error(pgoutbox._draft(pause_topic.topic, '1', NULL)),
        CASE
            WHEN pause_topic.duration NOT BETWEEN interval '1 second' AND interval '10 years'
                THEN 'duration: must be from 1 second to 10 years'
        END
    );
BEGIN
    PERFORM pgoutbox._raise_argument_error(problem, in_function => 'pause_topic');
    RETURN QUERY
    INSERT INTO pgoutbox.topic_pause AS p (topic, paused_at, resume_at)
    VALUES (pause_topic.topic, now(), now() + pause_topic.duration)
    ON CONFLICT ON CONSTRAINT topic_pause_pkey DO UPDATE
    SET paused_at = CASE WHEN p.resume_at <= now() THEN now() ELSE p.paused_at END,
        resume_at = excluded.resume_at
    RETURNING p.paused_at, p.resume_at;
    PERFORM pgoutbox._record_act(
        'pause',
        details => jsonb_strip_nulls(jsonb_build_object(
            'topic', pause_topic.topic, 'resume_at', now() + pause_topic.duration
        ))
    );
    IF pause_topic.duration IS NOT NULL THEN
        -- Idle workers may wait for a later end of an earlier pause, or for none.
        PERFORM pgoutbox._wake_all_workers();
    END IF;
END
$function$;
