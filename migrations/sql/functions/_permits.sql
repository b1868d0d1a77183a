-- Number of attempts of a queue that may begin now, up to wanted. Locks a queue with limits. One claim of a limited
-- queue at a time: its row stays locked until the claim has taken its tokens. Another claim does not wait for it, nor
-- for a session that changes the limits: it has no permit, and other queues go on.
--
-- knows_rate: whether the claim's own statement sees that the queue has a rate. This function may see a newer rate, of
-- which the statement would take no tokens.
CREATE FUNCTION pgoutbox._permits(p_queue text, wanted bigint, knows_rate boolean)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    limits pgoutbox.queue;
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
    SELECT q.* INTO limits FROM pgoutbox.queue AS q WHERE q.name = p_queue FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF limits.paused_at IS NOT NULL AND (limits.resume_at > clock_timestamp()) IS NOT FALSE THEN
        RETURN 0;
    END IF;
    IF limits.rate_count IS NOT NULL AND NOT knows_rate THEN
        RETURN 0;
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
