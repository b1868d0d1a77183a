-- The schema remains if it has other tables, such as the version table of a stand-alone installation. A superuser
-- becomes their owner. Their grants to these roles are revoked. A role remains if it is granted to another role, or has
-- privileges in another database. PostgreSQL fails with an internal error while that database is being dropped.
DO $block$
DECLARE
    known text;
    is_superuser constant boolean := (SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.rolname = current_user);
BEGIN
    IF is_superuser AND to_regrole('pgoutbox_owner') IS NOT NULL THEN
        REASSIGN OWNED BY pgoutbox_owner TO CURRENT_USER;
    END IF;
    FOREACH known IN ARRAY
        ARRAY['pgoutbox_producer', 'pgoutbox_worker', 'pgoutbox_operator', 'pgoutbox_viewer', 'pgoutbox_owner']
    LOOP
        CONTINUE WHEN to_regrole(known) IS NULL OR known = current_user;
        -- A member of this role has only its rights, and needs them until the end.
        CONTINUE WHEN known = 'pgoutbox_owner' AND NOT is_superuser;
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA pgoutbox FROM %I', known);
        EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA pgoutbox FROM %I', known);
        EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgoutbox FROM %I', known);
        EXECUTE format('REVOKE ALL ON SCHEMA pgoutbox FROM %I', known);
        CONTINUE WHEN EXISTS (
            SELECT
            FROM pg_catalog.pg_auth_members AS m
            WHERE m.roleid = to_regrole(known) AND m.member <> current_user::regrole
        );
        BEGIN
            EXECUTE format('DROP ROLE %I', known);
        EXCEPTION
            WHEN dependent_objects_still_exist OR insufficient_privilege OR undefined_object OR internal_error THEN
                NULL;
        END;
    END LOOP;
    BEGIN
        DROP SCHEMA pgoutbox;
    EXCEPTION
        WHEN dependent_objects_still_exist THEN
            NULL;
    END;
END
$block$;
