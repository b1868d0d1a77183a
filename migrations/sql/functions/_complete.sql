-- Finish these attempts of transactional handlers as sent. Return how many of them do not hold their message any more.
-- A function, so that its plan outlives the handler: sessions of handlers prepare nothing. The settings pin this plan: the
-- first handler of a session may have forbidden indexes, and statistics may describe an empty table. A message at a time,
-- because an array of ids has another plan, with pages of dead rows. It waits for a locked row: PostgreSQL sees a deadlock
-- with the handler's own locks, and ends it.
CREATE FUNCTION pgoutbox._complete(
    p_ids bigint[], p_attempt_counts integer[], p_worker text, p_claimed_ats timestamptz[]
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '0'
SET enable_indexscan = on
SET enable_seqscan = off
SET jit = off
AS $function$
DECLARE
    lost_count bigint := 0;
BEGIN
    FOR n IN 1 .. cardinality(p_ids) LOOP
        UPDATE pgoutbox.message AS m
        SET state = 'sent',
            finished_at = now(),
            key_in_flight = NULL
        WHERE m.id = p_ids[n]
            AND m.state = 'sending'
            AND m.worker = p_worker
            AND m.attempt_count = p_attempt_counts[n]
            AND m.claimed_at = p_claimed_ats[n];
        lost_count := lost_count + CASE WHEN FOUND THEN 0 ELSE 1 END;
    END LOOP;
    RETURN lost_count;
END
$function$;
