-- Write a checked message that has an id, and ring. It pins no settings: only _enqueue_checked may call it, and that
-- function has pinned them.
CREATE FUNCTION pgoutbox._write_message(
    p_id bigint,
    p_topic text,
    p_payload jsonb,
    p_queue text,
    p_destination text,
    p_coalesce_key text,
    p_dedupe_key text,
    p_available_at timestamptz,
    p_expires_at timestamptz,
    p_headers jsonb,
    p_max_attempts integer,
    p_ordering_key text,
    p_on_failed text,
    p_coalesces_pending boolean,
    p_notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
BEGIN
    IF pgoutbox._is_large(p_payload) THEN
        INSERT INTO pgoutbox.large_payload (message_id, body) VALUES (p_id, p_payload);
        p_payload := NULL;
    END IF;
    INSERT INTO pgoutbox.message_live (
        id, topic, payload, queue, destination, coalesce_key, dedupe_key, ordering_key, on_failed,
        available_at, expires_at, headers, max_attempts, attempt_budget, coalesces_pending
    ) VALUES (
        p_id, p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key, p_ordering_key, p_on_failed,
        greatest(p_available_at, pg_catalog.now()), p_expires_at, p_headers, p_max_attempts, p_max_attempts,
        p_coalesces_pending
    );
    IF p_notify IS NOT FALSE
        AND NOT pg_catalog.pg_try_advisory_xact_lock_shared(1885826146, pg_catalog.hashtext(p_queue))
        AND pg_catalog.pg_notification_queue_usage() OPERATOR(pg_catalog.<) 0.9
    THEN
        PERFORM pg_catalog.pg_notify('pgoutbox', p_queue);
    END IF;
    RETURN p_id;
END
$function$;

COMMENT ON FUNCTION pgoutbox._write_message IS
    'Insert one valid message and wake a sleeping worker when the transaction commits.';
