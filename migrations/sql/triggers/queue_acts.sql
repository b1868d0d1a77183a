-- Record a pause, its end, or new limits of a queue in the audit, and wake the workers that may claim more or earlier.
CREATE FUNCTION pgoutbox._record_queue_act()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC' -- The details do not depend on the session.
AS $function$
DECLARE
    limits jsonb := '{}';
BEGIN
    IF (NEW.paused_at, NEW.resume_at) IS DISTINCT FROM (OLD.paused_at, OLD.resume_at) THEN
        PERFORM pgoutbox._record_act(
            CASE WHEN NEW.paused_at IS NULL THEN 'resume' ELSE 'pause' END,
            queue => NEW.name,
            details => CASE WHEN NEW.resume_at IS NOT NULL THEN jsonb_build_object('resume_at', NEW.resume_at) END
        );
    END IF;
    IF (NEW.rate_count, NEW.rate_seconds, NEW.burst) IS DISTINCT FROM (OLD.rate_count, OLD.rate_seconds, OLD.burst) THEN
        limits := jsonb_strip_nulls(jsonb_build_object(
            'rate', coalesce(NEW.rate_count || '/' || NEW.rate_seconds::numeric || 's', 'none'), 'burst', NEW.burst
        ));
    END IF;
    IF NEW.max_in_flight IS DISTINCT FROM OLD.max_in_flight THEN
        limits := limits || jsonb_build_object('max_in_flight', coalesce(to_jsonb(NEW.max_in_flight), '"none"'));
    END IF;
    IF (NEW.ceiling_count, NEW.ceiling_seconds) IS DISTINCT FROM (OLD.ceiling_count, OLD.ceiling_seconds) THEN
        limits := limits || jsonb_build_object(
            'at_most', coalesce(NEW.ceiling_count || '/' || NEW.ceiling_seconds::numeric || 's', 'none')
        );
    END IF;
    IF limits <> '{}' THEN
        PERFORM pgoutbox._record_act('limit', queue => NEW.name, details => limits);
    END IF;
    IF NEW.paused_at IS NULL OR NEW.resume_at IS NOT NULL THEN
        -- Idle workers may wait for a later permit, for the end of an earlier pause, or for none.
        PERFORM pgoutbox._wake_all_workers(NEW.name);
    END IF;
    RETURN NULL;
END
$function$;

-- Claims write only tokens, which does not fire this trigger.
CREATE TRIGGER queue_acts
AFTER INSERT OR UPDATE OF
    paused_at, resume_at, rate_count, rate_seconds, burst, max_in_flight, ceiling_count, ceiling_seconds
ON pgoutbox.queue
FOR EACH ROW
EXECUTE FUNCTION pgoutbox._record_queue_act();
