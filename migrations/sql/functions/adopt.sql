-- Let the workers of this deployment send from this database: the schema belongs to it from now on. Without a
-- deployment, the name is not compared.
CREATE FUNCTION pgoutbox.adopt(deployment text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    previous pgoutbox.home;
BEGIN
    LOCK TABLE pgoutbox.home IN SHARE ROW EXCLUSIVE MODE; -- Of two concurrent calls one would fail.
    DELETE FROM pgoutbox.home RETURNING * INTO previous;
    INSERT INTO pgoutbox.home (server_id, database_id, adopted_by, deployment)
    SELECT
        here.server_id,
        here.database_id,
        coalesce(pgoutbox._announced() ->> 'actor', session_user),
        adopt.deployment
    FROM pgoutbox._here() AS here;
    PERFORM pgoutbox._record_act(
        'adopt',
        details => jsonb_strip_nulls(jsonb_build_object(
            'database', current_database(),
            'deployment', adopt.deployment,
            'previous_database', previous.database_name,
            'previous_deployment', previous.deployment
        ))
    );
END
$function$;
