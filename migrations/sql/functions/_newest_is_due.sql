-- A message of the rule `pending` waits for this one: if one claim began two messages of a key, the unique index would
-- refuse it.
CREATE FUNCTION pgoutbox._newest_is_due(p_topic text, p_coalesce_key text, p_queue text)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM pgoutbox.coalesce_head AS head
        JOIN pgoutbox.message_live AS m ON m.id OPERATOR(pg_catalog.=) head.newest_id
        WHERE head.topic OPERATOR(pg_catalog.=) p_topic
            AND head.coalesce_key OPERATOR(pg_catalog.=) p_coalesce_key
            AND m.queue OPERATOR(pg_catalog.=) p_queue
            AND m.state OPERATOR(pg_catalog.=) 'pending'
            AND m.available_at OPERATOR(pg_catalog.<=) pg_catalog.now()
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox._newest_is_due IS
    'Whether the newest message of a coalesce key by the rule newest is due in this queue.';
