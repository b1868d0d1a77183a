-- Raise OB001 in a copy: in a database, or for a deployment, that the schema does not belong to. Raise OB004 for a package
-- that is too old. Every session of a worker begins with this call, and behind a pooler every transaction. So no statement
-- of a worker runs in a copy.
CREATE FUNCTION pgoutbox._require_home(deployment text, package text)
RETURNS void
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    home record;
    problem text;
BEGIN
    PERFORM pgoutbox._require_package(_require_home.package);
    SELECT v.* INTO home FROM pgoutbox.home_view AS v;
    IF NOT FOUND THEN
        problem := 'the schema pgoutbox does not record the database that it belongs to';
    ELSIF NOT home.is_here THEN
        problem := format(
            'the schema pgoutbox belongs to database %I of server %s, and this is database %I of server %s',
            home.database_name,
            coalesce(home.server_id::text, 'unknown'),
            current_database(),
            coalesce((SELECT here.server_id FROM pgoutbox._here() AS here)::text, 'unknown')
        );
    ELSIF home.deployment <> coalesce(_require_home.deployment, '') THEN
        problem := format(
            'the schema pgoutbox belongs to deployment %s, and PGOUTBOX_DEPLOYMENT is %s',
            home.deployment, coalesce(_require_home.deployment, 'not set')
        );
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'OB001', MESSAGE = problem;
    END IF;
END
$function$;
