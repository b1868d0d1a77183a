-- Delete the messages with these ids, of this owner, or to this destination, in every state, with payloads, attempts,
-- keys and their traces in the audit, the messages for hooks about their failures, and their schedules. Returns for each message erased,
-- in_flight (its attempt is asked to stop: call again after it), locked (call again), or missing.
--
-- A message of a transaction that has not committed yet is not seen, and not erased.
CREATE FUNCTION pgoutbox.erase(ids bigint[] DEFAULT NULL, owner text DEFAULT NULL, destination text DEFAULT NULL)
RETURNS TABLE (id bigint, result text)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT e.id, e.result
FROM pgoutbox._erase(
    erase.ids || ARRAY(
        SELECT m.id FROM pgoutbox._selected_messages(erase.ids, erase.owner, erase.destination, true) AS m
    ),
    erase.owner,
    erase.destination
) AS e
$function$;
