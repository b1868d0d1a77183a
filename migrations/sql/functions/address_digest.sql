-- The digest of an e-mail address in the list of suppressed ones, in any case of letters, with or without `mailto:`. It begins
-- with a mark of this database's secret, so only this database and its copies can compare it.
CREATE FUNCTION pgoutbox.address_digest(address text)
RETURNS text
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT pgoutbox._list_mark() || left(
    pgoutbox._keyed_digest('suppression', regexp_replace(lower(address_digest.address COLLATE "C"), '^mailto:', '')), 32
)
$function$;
