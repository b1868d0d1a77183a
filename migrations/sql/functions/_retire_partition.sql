-- The messages of the partition are read, if necessary, under locks against writes to it and changes of rules. Then it
-- is detached. DETACH waits for all users of message_done, and later users wait behind it, for at most lock_timeout.
CREATE FUNCTION pgoutbox._retire_partition(partition_name text)
RETURNS text
LANGUAGE plpgsql
VOLATILE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET lock_timeout = '100ms'
AS $function$
DECLARE
    found_lower_at timestamptz;
    found_upper_at timestamptz;
BEGIN
    IF NOT pgoutbox._reads_committed() THEN
        RAISE EXCEPTION 'pgoutbox: the isolation level of the transaction does not allow to retire a partition' USING
            ERRCODE = 'invalid_transaction_state',
            HINT = 'Use READ COMMITTED.';
    END IF;
    BEGIN
        LOCK TABLE pgoutbox.retired IN SHARE ROW EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN 'busy';
    END;
    SELECT p.lower_at, p.upper_at
    INTO found_lower_at, found_upper_at
    FROM pgoutbox.partitions() AS p
    WHERE p.name = partition_name AND p.name ~ '^message_done_[0-9]{8}$';
    IF NOT FOUND THEN
        RETURN 'missing';
    ELSIF found_upper_at > now() THEN
        RETURN 'kept';
    END IF;
    LOCK TABLE pgoutbox.retention IN SHARE MODE;
    EXECUTE 'LOCK TABLE ONLY pgoutbox.' || quote_ident(partition_name) || ' IN SHARE ROW EXCLUSIVE MODE';
    IF pgoutbox._kept_until(found_lower_at, found_upper_at) > now() THEN
        RETURN 'kept';
    END IF;
    INSERT INTO pgoutbox.retired (name) VALUES (partition_name);
    EXECUTE 'ALTER TABLE pgoutbox.message_done DETACH PARTITION pgoutbox.' || quote_ident(partition_name);
    IF pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('prune', details => jsonb_build_object('partition', partition_name));
    END IF;
    RETURN 'retired';
END
$function$;

COMMENT ON FUNCTION pgoutbox._retire_partition IS
    'Detach a partition from message_done if no retention rule keeps any of its messages. Returns retired, kept, '
    'missing or busy.';
