-- Remove a retention rule. Returns false if there was none.
CREATE FUNCTION pgoutbox.unset_retention(topic text, state text)
RETURNS boolean
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
WITH deleted AS (
    DELETE FROM pgoutbox.retention AS r
    WHERE r.topic = unset_retention.topic AND r.state = unset_retention.state
    RETURNING r.topic
)
SELECT count(*) > 0 FROM deleted
$function$;
