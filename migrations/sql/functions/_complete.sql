-- Finish this attempt of a transactional handler as sent. Return 0 if it does not hold its message any more.
-- A function, so that its plan outlives the handler: sessions of handlers prepare nothing. The settings pin this plan: the
-- first handler of a session may have forbidden indexes, and statistics may describe an empty table. It waits for a locked
-- row: PostgreSQL sees a deadlock with the handler's own locks, and ends it.
CREATE FUNCTION pgoutbox._complete(p_id bigint, p_attempt_count integer, p_worker text, p_claimed_at timestamptz)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '0'
SET enable_indexscan = on
SET enable_seqscan = off
AS $function$
DECLARE
    sent_count bigint;
BEGIN
    UPDATE pgoutbox.message AS m
    SET state = 'sent',
        finished_at = now(),
        key_in_flight = NULL
    WHERE m.id = p_id
        AND m.state = 'sending'
        AND m.worker = p_worker
        AND m.attempt_count = p_attempt_count
        AND m.claimed_at = p_claimed_at;
    GET DIAGNOSTICS sent_count = ROW_COUNT;
    RETURN sent_count;
END
$function$;
