-- Take the locks on tables that enqueue needs. Waits at most a second for each, or for the caller's shorter
-- lock_timeout. A later enqueue of the transaction waits for keys only, and for the ended message that has its dedupe
-- key.
--
-- A lock_timeout cannot tell a locked table from a key that another transaction is enqueuing, so the locks on tables are
-- taken before, in the order of an enqueue. After an error, the caller's rollback to a savepoint restores its lock_timeout.
-- The tables of ended messages are left out: only a known dedupe key reads them, and a lock until the caller's commit would
-- delay each new partition and each drop of an old one.
CREATE FUNCTION pgoutbox.lock_for_enqueue()
RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    callers constant text := current_setting('lock_timeout');
BEGIN
    IF callers::interval NOT BETWEEN '1ms' AND '1s' THEN
        PERFORM set_config('lock_timeout', '1s', true);
    END IF;
    LOCK TABLE pgoutbox.dedupe, pgoutbox.key_head, pgoutbox.message_live IN ROW EXCLUSIVE MODE;
    LOCK TABLE pgoutbox.id_floor IN ACCESS SHARE MODE;
    PERFORM set_config('lock_timeout', callers, true);
END
$function$;
