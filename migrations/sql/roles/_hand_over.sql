-- Give all objects of the calling superuser to the owner of the tables, or to pgoutbox_owner if that owner is a
-- superuser. Does nothing for other callers. Functions run with their owner's privileges, so a superuser must not own
-- them. Each revision ends with set_up_roles, which calls this for the new objects. No other session can see them yet:
-- a migration locks no table that an enqueue uses. Only after a restore without the roles, the objects are in use. Then
-- it takes the locks in the order of an enqueue (sequence, keys, message, message_live), and releases all of them
-- unless it gets the last one within 200 ms. PostgreSQL looks for a deadlock after deadlock_timeout, one second by
-- default, so no deadlock ends a business transaction.
CREATE FUNCTION pgoutbox._hand_over()
RETURNS void
LANGUAGE plpgsql
AS $function$
DECLARE
    heir constant name := (
        SELECT CASE WHEN o.rolsuper THEN 'pgoutbox_owner' ELSE o.rolname END
        FROM pg_class AS c
        JOIN pg_roles AS o ON o.oid = c.relowner
        WHERE c.oid = 'pgoutbox.message'::regclass
    );
    lock_timeout_ms constant integer := (SELECT s.setting FROM pg_settings AS s WHERE s.name = 'lock_timeout');
    began_at constant timestamptz := clock_timestamp();
    trial_ends_at timestamptz;
    owned record;
BEGIN
    IF NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user) THEN
        RETURN;
    END IF;
    IF to_regrole(heir) IS NULL THEN
        BEGIN
            EXECUTE 'CREATE ROLE ' || quote_ident(heir) || ' NOLOGIN';
        EXCEPTION WHEN duplicate_object OR unique_violation THEN
            NULL; -- The migration of another database was faster.
        END;
    END IF;
    IF (SELECT n.nspowner FROM pg_namespace AS n WHERE n.nspname = 'pgoutbox') = current_user::regrole THEN
        EXECUTE 'ALTER SCHEMA pgoutbox OWNER TO ' || quote_ident(heir);
    END IF;
    LOOP
        trial_ends_at := clock_timestamp() + interval '200 ms';
        BEGIN
            FOR owned IN
                SELECT CASE o.name
                    -- The sequence belongs to the table message and follows it. This only locks it.
                    WHEN 'pgoutbox.message_id_seq' THEN 'ALTER SEQUENCE pgoutbox.message_id_seq SET LOGGED'
                    ELSE format('ALTER %s %s OWNER TO %I', o.kind, o.name, heir)
                END AS command
                FROM (
                    SELECT
                        CASE c.relkind WHEN 'c' THEN 'TYPE' WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END AS kind,
                        c.oid::regclass::text AS name,
                        c.oid
                    FROM pg_class AS c
                    WHERE c.relnamespace = 'pgoutbox'::regnamespace
                        AND (c.relkind IN ('c', 'r', 'p', 'v') OR c.oid = 'pgoutbox.message_id_seq'::regclass)
                        AND c.relowner = current_user::regrole
                    UNION ALL
                    SELECT 'ROUTINE', p.oid::regprocedure::text, p.oid
                    FROM pg_proc AS p
                    WHERE p.pronamespace = 'pgoutbox'::regnamespace AND p.proowner = current_user::regrole
                ) AS o
                ORDER BY
                    array_position('{TYPE,VIEW,TABLE,ROUTINE}', o.kind),
                    array_position(
                        '{message_id_seq,dedupe,key_head,message,message_live}', split_part(o.name, '.', 2)
                    ) NULLS LAST,
                    o.oid
            LOOP
                PERFORM set_config(
                    'lock_timeout',
                    greatest(1, ceil(extract(epoch FROM trial_ends_at - clock_timestamp()) * 1000))::text,
                    true
                );
                EXECUTE owned.command;
            END LOOP;
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            IF lock_timeout_ms > 0 AND clock_timestamp() > began_at + make_interval(secs => lock_timeout_ms / 1000.0)
            THEN
                RAISE;
            END IF;
        END;
        PERFORM pg_sleep(0.05); -- Let waiting sessions go on.
    END LOOP;
    PERFORM set_config('lock_timeout', lock_timeout_ms::text, true);
END
$function$;
