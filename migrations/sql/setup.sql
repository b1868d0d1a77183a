-- A new schema belongs to this database.
INSERT INTO pgoutbox.home (server_id, database_id)
SELECT here.server_id, here.database_id
FROM pgoutbox._here() AS here
ON CONFLICT ON CONSTRAINT home_pkey DO NOTHING;

-- The partitions of the next seven days.
DO $block$
BEGIN
    WHILE pgoutbox.make_partition() IS NOT NULL LOOP
    END LOOP;
END
$block$;

DO $block$
DECLARE
    missing constant text[] := pgoutbox.set_up_roles();
BEGIN
    IF cardinality(missing) > 0 THEN
        RAISE WARNING USING
            MESSAGE = 'pgoutbox: the migrating role may not create roles: ' || array_to_string(missing, ', '),
            HINT = 'Let a role that may create roles run: CREATE ROLE '
                || array_to_string(missing, ' NOLOGIN; CREATE ROLE ') || ' NOLOGIN; '
                || 'then run as the owner: SELECT pgoutbox.set_up_roles();';
    END IF;
END
$block$;
