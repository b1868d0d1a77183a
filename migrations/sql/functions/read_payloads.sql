-- The payloads of those of the messages that belong to this owner, with their versions. Only workers, which read payloads
-- anyway, may call it, and logins to which the owner of the schema has granted it.
CREATE FUNCTION pgoutbox.read_payloads(ids bigint[], owner text)
RETURNS TABLE (id bigint, payload jsonb, payload_version integer)
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT m.id, m.payload, m.payload_version
FROM pgoutbox.message AS m
WHERE m.owner = read_payloads.owner AND m.id = ANY (read_payloads.ids)
$function$;
