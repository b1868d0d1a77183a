-- Wake the sleeping workers of a queue when this transaction commits. NOTIFY takes a database-wide lock at commit, so
-- an enqueue notifies only while an idle worker has the wake-up lock, which is this advisory lock, exclusively. An
-- enqueue that does not notify holds the lock shared until its row is visible; the worker gets it only after that, and
-- polls once more before it sleeps. 1885826146 is "pgob" in ASCII. When the server's notification queue is full, the
-- COMMIT of every notifying transaction fails: an enqueue stops notifying before that, and workers already poll by
-- then.
CREATE FUNCTION pgoutbox._notify_workers(queue text)
RETURNS void
LANGUAGE plpgsql
AS $function$
BEGIN
    IF (
            NOT pg_catalog.pg_try_advisory_xact_lock_shared(1885826146, pg_catalog.hashtext(queue))
            OR pgoutbox._notifies_always()
        )
        AND pg_catalog.pg_notification_queue_usage() OPERATOR(pg_catalog.<) 0.9
    THEN
        PERFORM pg_catalog.pg_notify('pgoutbox', queue);
    END IF;
END
$function$;
