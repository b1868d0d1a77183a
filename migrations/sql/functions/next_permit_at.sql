-- Workers are not notified when another worker's attempt ends: they check a full queue again after a second.
CREATE FUNCTION pgoutbox.next_permit_at(p_queue text)
RETURNS timestamptz
LANGUAGE plpgsql
VOLATILE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    limits pgoutbox.queue;
    tokens_now double precision;
BEGIN
    SELECT q.* INTO limits FROM pgoutbox.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF limits.paused_at IS NOT NULL AND (limits.resume_at > clock_timestamp()) IS NOT FALSE THEN
        RETURN coalesce(limits.resume_at, 'infinity');
    END IF;
    tokens_now := pgoutbox._tokens_of(limits);
    IF tokens_now < 1 THEN
        RETURN clock_timestamp() + make_interval(secs => (1 - tokens_now) / limits.tokens_per_second);
    END IF;
    IF limits.max_in_flight IS NOT NULL
        AND pgoutbox._in_flight_of(p_queue, limits.max_in_flight) >= limits.max_in_flight
    THEN
        RETURN clock_timestamp() + interval '1 s';
    END IF;
    RETURN NULL;
END
$function$;

COMMENT ON FUNCTION pgoutbox.next_permit_at IS
    'When the next attempt of a queue may begin: null now, infinity while paused without an end.';
