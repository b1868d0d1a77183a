-- Drop a partition of message_done if no retention rule keeps any of its messages. Returns dropped, kept, missing or
-- busy. The messages of the partition are read, if necessary, under locks against writes to it and changes of rules.
-- The DROP waits for all users of message_done, and later users wait behind it, for at most lock_timeout.
--
-- Each function that changes partitions or grants locks the table home first. Only its owner may lock it, but every login
-- could take an advisory lock. These functions run with the owner's privileges, so that a worker needs none. They
-- generate the names in their dynamic SQL, or read them from the catalog.
CREATE FUNCTION pgoutbox._drop_partition(partition_name text)
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '100ms'
AS $function$
DECLARE
    part record;
BEGIN
    IF NOT pgoutbox._reads_committed() THEN
        RAISE EXCEPTION 'pgoutbox: the isolation level of the transaction does not allow to drop a partition' USING
            ERRCODE = 'invalid_transaction_state',
            HINT = 'Use READ COMMITTED.';
    END IF;
    BEGIN
        LOCK TABLE pgoutbox.home IN SHARE ROW EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN 'busy';
    END;
    SELECT p.*
    INTO part
    FROM pgoutbox.partitions() AS p
    WHERE p.name = partition_name AND p.name ~ '^message_done_[0-9]{8}$';
    IF NOT FOUND THEN
        RETURN 'missing';
    ELSIF part.upper_at > now() THEN
        RETURN 'kept';
    END IF;
    LOCK TABLE pgoutbox.retention IN SHARE MODE;
    EXECUTE 'LOCK TABLE ONLY pgoutbox.' || quote_ident(partition_name) || ' IN SHARE ROW EXCLUSIVE MODE';
    IF pgoutbox._kept_until(part.lower_at, part.upper_at) > now() THEN
        RETURN 'kept';
    END IF;
    EXECUTE 'DROP TABLE pgoutbox.' || quote_ident(partition_name);
    IF pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('prune', details => jsonb_build_object('partition', partition_name));
    END IF;
    RETURN 'dropped';
END
$function$;
