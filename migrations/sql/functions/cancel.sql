-- Cancel a message in this transaction, if it is in one of the states. Returns cancelled, requested (an attempt is in
-- flight: its handler is notified, and it is not retried), the other state of the message, missing, or
-- already_cancelled if it was cancelled before.
CREATE FUNCTION pgoutbox.cancel(message_id bigint, states text[] DEFAULT '{pending,sending}')
RETURNS text
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT c.result FROM pgoutbox._cancel_each(ARRAY[cancel.message_id], cancel.states) AS c
$function$;
