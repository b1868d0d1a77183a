-- Cancel all messages of an owner, or to a destination, that are pending or in flight, and optionally only those of one
-- topic. Returns for each message the same result as cancel.
--
-- A message of a transaction that has not committed yet is not seen, and not cancelled. The destination has no index:
-- every enqueue would pay for it, and only messages that are pending or in flight are read here.
CREATE FUNCTION pgoutbox.cancel_all(owner text DEFAULT NULL, destination text DEFAULT NULL, topic text DEFAULT NULL)
RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
-- A plan for a given owner has no condition on the destination, so an index finds the owner.
SET plan_cache_mode = force_custom_plan
AS $function$
#variable_conflict use_column
BEGIN
    PERFORM pgoutbox._raise_argument_error('owner: give either an owner or a destination', in_function => 'cancel_all')
    WHERE num_nonnulls(cancel_all.owner, cancel_all.destination) <> 1;
    RETURN QUERY
    SELECT c.id, c.result
    FROM pgoutbox._cancel_each(
        ARRAY(
            SELECT m.id
            FROM pgoutbox.message_live AS m
            WHERE (m.owner = cancel_all.owner OR m.destination = cancel_all.destination)
                AND m.topic = coalesce(cancel_all.topic, m.topic)
            ORDER BY m.id
        ),
        '{pending,sending}'
    ) AS c;
END
$function$;
