-- `is_act` excludes the cancels of applications in their business transactions.
CREATE FUNCTION pgoutbox.cancel(message_id bigint, states text[] DEFAULT '{pending,sending}')
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    result constant text := (SELECT c.result FROM pgoutbox._cancel_unrecorded(ARRAY[message_id], states) AS c);
BEGIN
    IF result IN ('cancelled', 'requested') AND pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('cancel', message_ids => ARRAY[message_id]);
    END IF;
    RETURN result;
END
$function$;

COMMENT ON FUNCTION pgoutbox.cancel IS
    'Cancel a message in this transaction, if it is in one of the states. Returns cancelled, requested (an attempt is '
    'in flight: its handler is notified, and it is not retried), the other state of the message, locked (the row '
    'stayed locked: try again), missing, or already_cancelled if it was cancelled before.';
