-- Let every enqueue notify at its commit, for listeners of your own, or with false only while a worker sleeps, which is
-- the default. Commits that notify run one after the other. Only the owner of the schema may call it.
CREATE FUNCTION pgoutbox.notify_every_enqueue(is_on boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION pgoutbox._notifies_always() RETURNS boolean LANGUAGE sql STABLE RETURN %s',
        (is_on IS TRUE)::text
    );
END
$function$;
