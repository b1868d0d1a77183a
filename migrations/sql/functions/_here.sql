-- The system identifier of this server, which its standbys and its backups share, and the OID of this database. A
-- superuser can revoke pg_control_system from the owner. Then the identifier is unknown, and only the database is
-- compared.
CREATE FUNCTION pgoutbox._here(OUT server_id bigint, OUT database_id oid)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    database_id := (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database());
    IF has_function_privilege('pg_control_system()', 'EXECUTE') THEN
        server_id := (SELECT c.system_identifier FROM pg_control_system() AS c);
    END IF;
END
$function$;
