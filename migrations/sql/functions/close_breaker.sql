-- Close a circuit breaker, and make up to at_most messages that it postponed due in a second. Returns whether it was
-- open, and the number of these messages and of those that waited behind it.
--
-- Workers read an open breaker again at most once a second. So the messages fall due after a second: a worker that
-- still took the breaker for open would postpone them again. The trigger of the table records the act when it deletes a
-- row.
CREATE FUNCTION pgoutbox.close_breaker(key text, at_most bigint DEFAULT 10000)
RETURNS TABLE (was_open boolean, message_count bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    freed text[];
    freed_count bigint;
BEGIN
    DELETE FROM pgoutbox.breaker AS b WHERE b.key = close_breaker.key
    RETURNING b.holds INTO freed;
    was_open := FOUND;
    -- Those that waited unclaimed behind it, and are due without a change.
    SELECT count(*)
    INTO freed_count
    FROM pgoutbox.message_live AS m
    WHERE freed <> '{}'
        AND m.state = 'pending'
        AND m.available_at <= now() + interval '1 second'
        AND pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) = ANY (freed);
    message_count := freed_count
        + pgoutbox._make_due('breaker_key', close_breaker.key, now() + interval '1 second', close_breaker.at_most);
    IF message_count > 0 AND NOT was_open AND pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('breaker', details => jsonb_build_object('key', close_breaker.key));
    END IF;
    RETURN NEXT;
END
$function$;
