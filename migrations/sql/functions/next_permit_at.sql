-- When the next attempt of a queue may begin: null now, infinity while paused without an end.
--
-- Workers are not notified when another worker's attempt ends: they check a full queue again after a second.
CREATE FUNCTION pgoutbox.next_permit_at(p_queue text)
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    limits pgoutbox.queue;
    token_at timestamptz;
BEGIN
    SELECT q.* INTO limits FROM pgoutbox.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF limits.paused_at IS NOT NULL AND (limits.resume_at > clock_timestamp()) IS NOT FALSE THEN
        RETURN coalesce(limits.resume_at, 'infinity');
    END IF;
    token_at := (pgoutbox._tokens_of(limits)).next_at;
    IF token_at IS NOT NULL THEN
        RETURN token_at;
    END IF;
    IF limits.max_in_flight IS NOT NULL
        AND pgoutbox._in_flight_of(p_queue, limits.max_in_flight) >= limits.max_in_flight
    THEN
        RETURN clock_timestamp() + interval '1 s';
    END IF;
    RETURN NULL;
END
$function$;
