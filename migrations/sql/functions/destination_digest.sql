-- The digest of a destination that the audit has when an operator sets it, in any case of letters. Only the owner of
-- the schema may compute it, to compare.
--
-- An erasure keeps it: only the owner of the schema can compare it with an address, and nobody reads an address from it.
CREATE FUNCTION pgoutbox.destination_digest(destination text)
RETURNS text
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT left(pgoutbox._keyed_digest('destination', lower(destination_digest.destination)), 32)
$function$;
