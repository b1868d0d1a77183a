-- Lock those of the messages that are pending and that nobody has locked. Returns their ids. No other lock may be left
-- behind: a worker would wait at a row in flight. PostgreSQL also locks a row that has changed since the statement
-- began, and then does not return it. So if a row is missing, a savepoint undoes all of these locks, and the others are
-- locked without it. The number of savepoints does not depend on the number of messages.
CREATE FUNCTION pgoutbox._lock_pending(ids bigint[])
RETURNS bigint[]
LANGUAGE plpgsql
AS $function$
DECLARE
    wanted bigint[] := ids;
    locked bigint[];
BEGIN
    FOR trial IN 1..10 LOOP
        BEGIN
            wanted := ARRAY(
                SELECT m.id FROM pgoutbox.message_live AS m WHERE m.id = ANY (wanted) AND m.state = 'pending'
            );
            locked := ARRAY(
                SELECT m.id
                FROM pgoutbox.message_live AS m
                WHERE m.id = ANY (wanted) AND m.state = 'pending'
                ORDER BY m.id
                FOR UPDATE SKIP LOCKED
            );
            IF cardinality(locked) = cardinality(wanted) THEN
                RETURN locked;
            END IF;
            RAISE SQLSTATE 'PGOBX';
        EXCEPTION
            WHEN SQLSTATE 'PGOBX' THEN
                wanted := locked;
            WHEN serialization_failure THEN
                -- A row has moved to another partition since the statement began.
                IF NOT pgoutbox._reads_committed() THEN
                    RAISE;
                END IF;
        END;
    END LOOP;
    RETURN '{}';
END
$function$;
