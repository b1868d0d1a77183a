-- Set how long messages of a topic, or of *, are kept in a state. Null keeps them without a limit.
CREATE FUNCTION pgoutbox.set_retention(topic text, state text, keep interval)
RETURNS void
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
INSERT INTO pgoutbox.retention (topic, state, keep)
VALUES (set_retention.topic, set_retention.state, set_retention.keep)
ON CONFLICT ON CONSTRAINT retention_pkey DO UPDATE SET keep = excluded.keep
$function$;
