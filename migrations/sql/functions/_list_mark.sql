-- The first 8 digits of all digests of suppressed addresses: they name the secret of this database.
CREATE FUNCTION pgoutbox._list_mark()
RETURNS text
LANGUAGE sql
STABLE
AS $function$
SELECT left(pgoutbox._keyed_digest('mailing lists', ''), 8)
$function$;
