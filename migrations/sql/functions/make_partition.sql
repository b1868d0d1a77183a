-- Create the next partition of message_done, of a day or a week. Returns its name; null if those of the next seven days
-- exist, or another session is creating one. Refused while the default partition is larger.
--
-- The search for the first day without a partition starts today, not after the last partition: a clock that was ahead
-- for a moment leaves partitions weeks ahead. ATTACH locks message_done in a mode that blocks neither writers nor
-- readers, and the default partition exclusively. It also reads all of the default partition, hence the limit on its
-- size. It only waits for the default partition, and only if a partition must be created.
CREATE FUNCTION pgoutbox.make_partition(largest_default bigint DEFAULT 134217728)
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET lock_timeout = '100ms'
AS $function$
DECLARE
    from_at timestamptz := date_trunc('day', now());
    horizon constant timestamptz := from_at + interval '7 days';
    to_at timestamptz;
    covered_until timestamptz;
    weekly boolean;
    made text;
BEGIN
    BEGIN
        LOCK TABLE pgoutbox.home IN SHARE ROW EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN NULL;
    END;
    SELECT
        coalesce(
            bool_or(r.keep IS NULL)
            OR max(r.keep) > interval '62 days'
            OR count(*) FILTER (WHERE r.topic = '*') < 3,
            true
        )
    INTO weekly
    FROM pgoutbox.retention AS r
    WHERE r.state IN ('sent', 'skipped', 'cancelled');
    LOOP
        IF from_at >= horizon THEN
            RETURN NULL;
        END IF;
        SELECT
            max(p.upper_at) FILTER (WHERE p.lower_at <= from_at AND p.upper_at > from_at),
            least(
                CASE WHEN weekly THEN date_trunc('week', from_at) ELSE from_at END
                    + CASE WHEN weekly THEN interval '7 days' ELSE interval '1 day' END,
                min(p.lower_at) FILTER (WHERE p.lower_at > from_at)
            )
        INTO covered_until, to_at
        FROM pgoutbox.partitions() AS p;
        made := 'message_done_' || to_char(from_at, 'YYYYMMDD');
        EXIT WHEN covered_until IS NULL
            AND to_regclass('pgoutbox.' || made) IS NULL
            AND NOT EXISTS (
                SELECT
                FROM ONLY pgoutbox.message_done_default AS m
                WHERE m.finished_at >= from_at AND m.finished_at < to_at
            );
        from_at := coalesce(covered_until, from_at + interval '1 day');
    END LOOP;
    IF pg_relation_size('pgoutbox.message_done_default') > largest_default THEN
        RAISE EXCEPTION 'message_done_default has more than largest_default bytes' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Delete old messages and vacuum, or give a larger limit while little is sent.';
    END IF;
    LOCK TABLE ONLY pgoutbox.message_done IN SHARE UPDATE EXCLUSIVE MODE;
    LOCK TABLE ONLY pgoutbox.message_done_default IN ACCESS EXCLUSIVE MODE;
    IF EXISTS (
        SELECT
        FROM ONLY pgoutbox.message_done_default AS m
        WHERE m.finished_at >= from_at AND m.finished_at < to_at
    ) THEN
        RETURN NULL; -- The message came before the lock.
    END IF;
    EXECUTE 'CREATE TABLE pgoutbox.' || quote_ident(made) || ' (LIKE pgoutbox.message_done INCLUDING ALL)';
    EXECUTE 'ALTER TABLE pgoutbox.message_done ATTACH PARTITION pgoutbox.' || quote_ident(made)
        || ' FOR VALUES FROM (' || quote_literal(from_at) || ') TO (' || quote_literal(to_at) || ')';
    RETURN made;
END
$function$;
