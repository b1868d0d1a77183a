CREATE FUNCTION pgoutbox._cancel_unrecorded(message_id bigint, states text[])
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    found_state text;
    ordered_queue text;
BEGIN
    IF message_id IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = '22004', SCHEMA = 'pgoutbox', COLUMN = 'message_id',
            MESSAGE = 'pgoutbox.cancel: message_id: must not be null';
    END IF;
    -- A worker locks a row only for one statement. This function does not wait for a row: if the row moves to another
    -- partition during the wait, the caller's whole transaction fails.
    FOR trial IN 1..50 LOOP
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
        EXCEPTION WHEN serialization_failure THEN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                RAISE;
            END IF;
        END;
        SELECT m.state INTO found_state FROM pgoutbox.message AS m WHERE m.id = message_id;
        IF NOT FOUND THEN
            RETURN 'missing';
        END IF;
        IF found_state NOT IN ('pending', 'sending') AND current_setting('transaction_isolation') <> 'read committed'
        THEN
            -- The snapshot may be older than a redrive. Then the lock is refused, and the caller has to try again.
            PERFORM FROM pgoutbox.message AS m WHERE m.id = message_id AND m.state = found_state
            FOR KEY SHARE SKIP LOCKED;
        END IF;
        IF found_state = 'cancelled' THEN
            RETURN 'already_cancelled'; -- The audit records only the first cancel.
        ELSIF (found_state IN ('pending', 'sending') AND found_state = ANY (states)) IS NOT TRUE THEN
            RETURN found_state;
        END IF;
        PERFORM pg_sleep(0.002);
    END LOOP;
    RETURN 'locked';
END
$function$;

COMMENT ON FUNCTION pgoutbox._cancel_unrecorded IS 'cancel without the audit.';
