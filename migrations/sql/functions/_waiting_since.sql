-- Each newer message of a coalesce key restarts its delay, up to max_delay after this time. The row is inserted first,
-- so that of two concurrent first messages of a key the second one has a row to wait for.
CREATE FUNCTION pgoutbox._waiting_since(p_topic text, p_coalesce_key text, p_id bigint)
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    known_id bigint;
    since timestamptz;
BEGIN
    INSERT INTO pgoutbox.coalesce_head (newest_id, topic, coalesce_key)
    VALUES (p_id, p_topic, p_coalesce_key)
    ON CONFLICT ON CONSTRAINT coalesce_head_pkey DO NOTHING;
    SELECT head.newest_id, head.waiting_since
    INTO known_id, since
    FROM pgoutbox.coalesce_head AS head
    WHERE head.topic = p_topic AND head.coalesce_key = p_coalesce_key
    FOR UPDATE;
    RETURN coalesce(
        (
            SELECT since
            FROM pgoutbox.message AS m
            WHERE m.id = known_id AND m.state = 'pending' AND m.attempt_count = 0
        ),
        now()
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox._waiting_since IS
    'When the first of the fresh messages that wait at a coalesce key was enqueued; now if none waits. Locks the key.';
