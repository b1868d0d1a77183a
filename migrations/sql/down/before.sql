-- A downgrade that was meant for a revision of the application can reach this one: `alembic downgrade -1` takes any head.
-- So it needs a word of its own, whatever the outbox contains.
DO $block$
BEGIN
    IF coalesce(current_setting('pgoutbox.delete_messages', true), '') NOT IN ('delivered', 'all') THEN
        RAISE EXCEPTION 'pgoutbox: the outbox would be dropped, with its messages, dedupe keys and audit' USING
            ERRCODE = 'object_in_use',
            HINT = 'To undo a revision of your own, run: alembic downgrade YOUR_BRANCH@-1. To remove pgoutbox, see '
                'https://pgoutbox.github.io/pgoutbox/latest/how-to/migrations.html#remove-the-outbox';
    END IF;
END
$block$;

-- Take the locks in the order of an enqueue: otherwise a deadlock could end a business transaction. A turn of
-- maintenance locks maintenance_run before it reads the partitions.
LOCK TABLE
    pgoutbox.home, pgoutbox.worker, pgoutbox.maintenance_run, pgoutbox.audit,
    pgoutbox.retention, pgoutbox.content, pgoutbox.breaker,
    pgoutbox.dedupe, pgoutbox.key_head, pgoutbox.queue, pgoutbox.topic_pause, pgoutbox.rate_claim, pgoutbox.claim,
    pgoutbox.cancel_request, pgoutbox.message, pgoutbox.id_floor,
    pgoutbox.revision
IN ACCESS EXCLUSIVE MODE;

-- The locks above keep both answers true until the end: no worker can claim, and nobody can enqueue.
DO $block$
DECLARE
    running text;
    undelivered text;
BEGIN
    SELECT string_agg(w.name, ', ' ORDER BY w.name)
    INTO running
    FROM pgoutbox.worker_view AS w
    WHERE w.ended_at IS NULL;
    IF running IS NOT NULL THEN
        RAISE EXCEPTION 'pgoutbox: workers are running: %', running USING
            ERRCODE = 'object_in_use',
            HINT = 'Stop them. A killed worker counts for three minutes.';
    END IF;
    IF current_setting('pgoutbox.delete_messages') = 'delivered' THEN
        SELECT string_agg(c.number || ' ' || c.state, ', ' ORDER BY c.state)
        INTO undelivered
        FROM (
            SELECT m.state, count(*) AS number
            FROM pgoutbox.message AS m
            WHERE m.state IN ('pending', 'sending', 'failed')
            GROUP BY m.state
        ) AS c;
        IF undelivered IS NOT NULL THEN
            RAISE EXCEPTION 'pgoutbox: messages that are not delivered would be deleted: %', undelivered USING
                ERRCODE = 'object_in_use',
                HINT = 'Deliver or cancel them, or pass --delete-messages.';
        END IF;
    END IF;
END
$block$;
