-- End the pause of a topic, and wake the workers. Returns false if the topic was not paused.
CREATE FUNCTION pgoutbox.resume_topic(topic text)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    was_paused boolean;
BEGIN
    DELETE FROM pgoutbox.topic_pause AS p
    WHERE p.topic = resume_topic.topic
    RETURNING (p.resume_at > now()) IS NOT FALSE INTO was_paused;
    IF was_paused IS NOT TRUE THEN
        RETURN false;
    END IF;
    PERFORM pgoutbox._record_act('resume', details => jsonb_build_object('topic', resume_topic.topic));
    PERFORM pgoutbox._wake_all_workers();
    RETURN true;
END
$function$;
