-- A worker locks a row only for one statement, so a few tries are enough.
CREATE FUNCTION pgoutbox._cancel_unrecorded(message_id bigint, states text[])
RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    result text;
BEGIN
    IF message_id IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = '22004', SCHEMA = 'pgoutbox', COLUMN = 'message_id',
            MESSAGE = 'pgoutbox.cancel: message_id: must not be null';
    END IF;
    FOR trial IN 1..50 LOOP
        BEGIN
            result := pgoutbox._try_cancel(message_id, states);
        EXCEPTION WHEN serialization_failure THEN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                RAISE;
            END IF;
        END;
        IF result IS NOT NULL THEN
            RETURN result;
        END IF;
        PERFORM pg_sleep(0.002);
    END LOOP;
    RETURN 'locked';
END
$function$;

COMMENT ON FUNCTION pgoutbox._cancel_unrecorded IS 'cancel without the audit.';
