-- Lock the tables of messages for a revision that changes them, and the reports of workers for `_note_revision`. It gets
-- all locks or none, in 0.9 seconds or the lock_timeout of the transaction. Later statements wait for other locks for 50 ms.
--
-- ALTER TABLE locks a table before its partitions. Enqueues, claims and finishes lock message_live first: each would wait
-- for the other, and a business transaction that waits for deadlock_timeout may fail.
CREATE FUNCTION pgoutbox._lock_messages()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    deadlock_ms CONSTANT float8 := 1000 * extract(epoch FROM current_setting('deadlock_timeout')::interval);
    lock_ms CONSTANT float8 := 1000 * extract(epoch FROM current_setting('lock_timeout')::interval);
    patience_ms CONSTANT float8 := least(nullif(lock_ms, 0), 900, 0.9 * deadlock_ms);
    began_at timestamptz;
    left_ms float8;
BEGIN
    -- PostgreSQL ends an autovacuum that has been in the way for deadlock_timeout. Nothing else waits behind this lock.
    PERFORM set_config('lock_timeout', round(2 * deadlock_ms)::text, true);
    LOCK TABLE pgoutbox.message, pgoutbox.worker IN SHARE UPDATE EXCLUSIVE MODE;
    began_at := clock_timestamp();
    LOOP
        left_ms := patience_ms - 1000 * extract(epoch FROM clock_timestamp() - began_at);
        PERFORM set_config('lock_timeout', round(greatest(left_ms, 50))::text, true);
        BEGIN
            LOCK TABLE ONLY pgoutbox.message_live IN ACCESS EXCLUSIVE MODE;
            -- Most transactions wait for message_live now. One that already has another lock goes on after the timeout.
            PERFORM set_config('lock_timeout', '50', true);
            LOCK TABLE pgoutbox.message IN ACCESS EXCLUSIVE MODE;
            LOCK TABLE pgoutbox.worker IN SHARE MODE;
            RETURN;
        EXCEPTION
            WHEN lock_not_available THEN
                IF left_ms <= 50 THEN
                    RAISE;
                END IF;
        END;
    END LOOP;
END
$function$;
