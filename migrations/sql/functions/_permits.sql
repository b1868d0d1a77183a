-- One claim of a limited queue at a time: its row stays locked until the claim has taken its tokens. Another claim does
-- not wait for it, nor for a session that changes the limits: it has no permit, and other queues go on.
CREATE FUNCTION pgoutbox._permits(p_queue text, wanted bigint)
RETURNS bigint
LANGUAGE plpgsql
VOLATILE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    limits pgoutbox.queue;
    had_rate boolean;
BEGIN
    SELECT q.* INTO limits FROM pgoutbox.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN wanted;
    END IF;
    IF pgoutbox.next_permit_at(p_queue) IS NOT NULL THEN
        RETURN 0;
    END IF;
    IF num_nonnulls(limits.rate_count, limits.max_in_flight) = 0 THEN
        RETURN wanted;
    END IF;
    had_rate := limits.rate_count IS NOT NULL;
    SELECT q.* INTO limits FROM pgoutbox.queue AS q WHERE q.name = p_queue FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF limits.paused_at IS NOT NULL AND (limits.resume_at > clock_timestamp()) IS NOT FALSE THEN
        RETURN 0;
    END IF;
    IF limits.rate_count IS NOT NULL AND NOT had_rate THEN
        RETURN 0; -- The claim does not see a rate that is newer than its statement, and would take no tokens.
    END IF;
    RETURN greatest(0, least(
        wanted,
        floor((pgoutbox._tokens_of(limits)).tokens)::bigint,
        CASE
            WHEN limits.max_in_flight IS NOT NULL
                THEN limits.max_in_flight - pgoutbox._in_flight_of(p_queue, limits.max_in_flight)
        END
    ));
END
$function$;

COMMENT ON FUNCTION pgoutbox._permits IS
    'Number of attempts of a queue that may begin now, up to wanted. Locks a queue with limits.';
