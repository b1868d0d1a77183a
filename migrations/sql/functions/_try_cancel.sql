-- This function does not wait for a row: if the row moves to another partition during the wait, the caller's whole
-- transaction fails.
CREATE FUNCTION pgoutbox._try_cancel(message_id bigint, states text[])
RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    found_state text;
    ordered_queue text;
BEGIN
    SELECT m.state
    INTO found_state
    FROM pgoutbox.message AS m
    WHERE m.id = message_id AND m.state IN ('pending', 'sending') AND m.state = ANY (states)
    FOR UPDATE SKIP LOCKED;
    IF found_state = 'pending' THEN
        UPDATE pgoutbox.message AS m
        SET state = 'cancelled', finished_at = clock_timestamp()
        WHERE m.id = message_id AND m.state = 'pending'
        RETURNING CASE WHEN m.ordering_key IS NOT NULL THEN m.queue END INTO ordered_queue;
        IF ordered_queue IS NOT NULL THEN
            PERFORM pgoutbox._notify_workers(ordered_queue); -- Another message may now be the first of its key.
        END IF;
        RETURN 'cancelled';
    ELSIF found_state = 'sending' THEN
        UPDATE pgoutbox.message AS m
        SET cancel_requested_at = coalesce(m.cancel_requested_at, clock_timestamp())
        WHERE m.id = message_id AND m.state = 'sending';
        RETURN 'requested';
    END IF;

    SELECT m.state INTO found_state FROM pgoutbox.message AS m WHERE m.id = message_id;
    IF NOT FOUND THEN
        RETURN 'missing';
    ELSIF found_state IN ('pending', 'sending') THEN
        RETURN CASE WHEN found_state = ANY (states) THEN NULL ELSE found_state END;
    END IF;
    IF NOT pgoutbox._reads_committed() THEN
        -- The snapshot may be older than a redrive. Then the lock is refused, and the caller has to try again.
        PERFORM FROM pgoutbox.message AS m WHERE m.id = message_id AND m.state = found_state
        FOR KEY SHARE SKIP LOCKED;
    END IF;
    -- The audit records only the first cancel.
    RETURN CASE found_state WHEN 'cancelled' THEN 'already_cancelled' ELSE found_state END;
END
$function$;

COMMENT ON FUNCTION pgoutbox._try_cancel IS
    'cancel without the audit. Null if another session has locked the message at this moment.';
