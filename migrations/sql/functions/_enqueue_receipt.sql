-- Its callers need no privilege on any table: it runs with the owner's privileges. So it must check the arguments
-- itself. It is the only function without a search_path, which would cost several percent of an enqueue: it has no
-- operator, and every name is qualified, also of the types (docs/decisions/0016). The plain case is here, because
-- another function would cost as much again, and so would a row as the result. The id is negative if the message already
-- existed.
CREATE FUNCTION pgoutbox._enqueue_receipt(
    topic text,
    payload jsonb,
    queue text,
    destination text,
    coalesce_key text,
    dedupe_key text,
    available_at timestamptz,
    expires_at timestamptz,
    headers jsonb,
    max_attempts integer,
    ordering_key text,
    on_failed text,
    max_delay interval,
    owner text,
    on_duplicate text,
    notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
AS $function$
DECLARE
    -- The transaction has its id before its messages have theirs: CLAIM_NEW of the worker relies on it.
    own_xid constant pg_catalog.xid8 := pg_catalog.pg_current_xact_id();
    new_id bigint;
BEGIN
    IF pgoutbox._is_plain(
        topic, payload, queue, destination, coalesce_key, dedupe_key, available_at, expires_at, headers, max_attempts,
        ordering_key, on_failed, max_delay, owner, on_duplicate
    ) THEN
        new_id := pg_catalog.nextval('pgoutbox.message_id_seq');
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, max_attempts, attempt_budget
        ) VALUES (
            new_id, topic, payload, queue, max_attempts, max_attempts
        );
        IF notify IS NOT FALSE
            AND NOT pg_catalog.pg_try_advisory_xact_lock_shared(1885826146, pg_catalog.hashtext(queue))
            AND pg_catalog.pg_notification_queue_usage() OPERATOR(pg_catalog.<) 0.9
        THEN
            PERFORM pg_catalog.pg_notify('pgoutbox', queue);
        END IF;
        RETURN new_id;
    END IF;
    RETURN pgoutbox._enqueue_checked(
        topic, payload, queue, destination, coalesce_key, dedupe_key,
        available_at, expires_at, headers, max_attempts, ordering_key, on_failed, max_delay, owner, on_duplicate,
        notify
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue_receipt IS
    'enqueue without defaults. The id is negative if the message already existed.';
