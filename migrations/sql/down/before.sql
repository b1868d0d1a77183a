-- Take the locks in the order of an enqueue: otherwise a deadlock could end a business transaction. A turn of
-- maintenance locks maintenance_run before it reads the partitions.
LOCK TABLE
    pgoutbox.worker, pgoutbox.worker_run, pgoutbox.maintenance_run, pgoutbox.retired, pgoutbox.audit, pgoutbox.retention,
    pgoutbox.content, pgoutbox.breaker,
    pgoutbox.dedupe, pgoutbox.ordering, pgoutbox.coalesce_head, pgoutbox.queue, pgoutbox.renewal, pgoutbox.attempt,
    pgoutbox.large_payload, pgoutbox.message
IN ACCESS EXCLUSIVE MODE;

-- A detached partition is not dropped with the table message.
DO $block$
DECLARE
    part text;
BEGIN
    FOR part IN SELECT r.name FROM pgoutbox.retired AS r LOOP
        EXECUTE 'DROP TABLE pgoutbox.' || quote_ident(part);
    END LOOP;
END
$block$;
