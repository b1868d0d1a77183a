-- The state of a message; null if it is deleted. Enqueue calls it only for duplicates. Volatile, so that it sees the
-- commit for which the enqueue had to wait.
CREATE FUNCTION pgoutbox._state_of(message_id bigint)
RETURNS text
LANGUAGE plpgsql
VOLATILE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN (SELECT m.state FROM pgoutbox.message AS m WHERE m.id = message_id);
END
$function$;
