-- With DELETE on the table, an operator could also lock it against every worker.
CREATE FUNCTION pgoutbox._forget_renewals()
RETURNS void
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DELETE FROM pgoutbox.renewal AS r WHERE r.lease_expires_at < now() - interval '1 day'
$function$;

COMMENT ON FUNCTION pgoutbox._forget_renewals IS
    'Delete old renewals of locked rows. A renewal lasts for one lease, which is at most a day.';
