-- The schema remains if it has other tables. This also revokes their grants to these roles. A role remains if it is
-- granted to another role, or has privileges in another database. PostgreSQL fails with an internal error while that
-- database is being dropped.
DO $block$
DECLARE
    known text;
BEGIN
    FOREACH known IN ARRAY ARRAY['pgoutbox_producer', 'pgoutbox_worker', 'pgoutbox_operator', 'pgoutbox_viewer'] LOOP
        CONTINUE WHEN to_regrole(known) IS NULL OR known = current_user;
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA pgoutbox FROM %I', known);
        EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA pgoutbox FROM %I', known);
        EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgoutbox FROM %I', known);
        EXECUTE format('REVOKE ALL ON SCHEMA pgoutbox FROM %I', known);
        IF NOT EXISTS (
            SELECT
            FROM pg_catalog.pg_auth_members AS m
            WHERE m.roleid = to_regrole(known) AND m.member <> current_user::regrole
        ) THEN
            BEGIN
                EXECUTE format('DROP ROLE %I', known);
            EXCEPTION
                WHEN dependent_objects_still_exist OR insufficient_privilege OR undefined_object OR internal_error THEN
                NULL;
            END;
        END IF;
    END LOOP;
END
$block$;

-- The version table of a stand-alone installation lives in the schema too; then the schema stays.
DO $block$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_class WHERE relnamespace = 'pgoutbox'::regnamespace)
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc WHERE pronamespace = 'pgoutbox'::regnamespace)
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_type WHERE typnamespace = 'pgoutbox'::regnamespace)
    THEN
        DROP SCHEMA pgoutbox;
    END IF;
END
$block$;

-- The schema and the version table may remain; they go to the caller. The role remains for the same reasons as the
-- others.
DO $block$
BEGIN
    IF to_regrole('pgoutbox_owner') IS NULL
        OR NOT (SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.rolname = current_user)
    THEN
        RETURN;
    END IF;
    REASSIGN OWNED BY pgoutbox_owner TO CURRENT_USER;
    IF NOT EXISTS (
        SELECT
        FROM pg_catalog.pg_auth_members AS m
        WHERE m.roleid = 'pgoutbox_owner'::regrole AND m.member <> current_user::regrole
    ) THEN
        BEGIN
            DROP ROLE pgoutbox_owner;
        EXCEPTION WHEN dependent_objects_still_exist OR undefined_object OR internal_error THEN
            NULL;
        END;
    END IF;
END
$block$;
