-- Claims that choose from one backlog at once pass over each other's locked rows: eight workers spend more time on that
-- than on their own rows. So at most two claims choose at once: the second one while the first one waits for its
-- commit. Correctness does not depend on the turn: after a quarter of a second a claim continues without it.
CREATE FUNCTION pgoutbox._take_turn(p_queue text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '250ms'
AS $function$
BEGIN
    IF pg_try_advisory_xact_lock(1885826147, hashtext(p_queue))
        OR pg_try_advisory_xact_lock(1885826148, hashtext(p_queue))
    THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM pg_advisory_xact_lock(1885826147 + pg_backend_pid() % 2, hashtext(p_queue));
    EXCEPTION
        WHEN lock_not_available THEN
            NULL;
    END;
END
$function$;

COMMENT ON FUNCTION pgoutbox._take_turn IS
    'Wait until at most one other claim chooses from the backlog of a queue. Gives up after 250 ms.';
