DO $block$
BEGIN
    WHILE pgoutbox.make_partition(9223372036854775807) IS NOT NULL LOOP
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
            HINT = 'Have somebody who may run: CREATE ROLE ' || array_to_string(missing, ' NOLOGIN; CREATE ROLE ')
                || ' NOLOGIN; and then run as the owner: SELECT pgoutbox.set_up_roles();';
    END IF;
END
$block$;
