-- The digest of an e-mail address in the list of suppressed ones, in any case of letters, with or without `mailto:`. A domain
-- must be in its xn-- form. Only this database computes it.
CREATE FUNCTION pgoutbox.address_digest(address text)
RETURNS text
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT left(pgoutbox._keyed_digest('suppression', regexp_replace(lower(address_digest.address), '^mailto:', '')), 32)
$function$;
