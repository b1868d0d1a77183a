-- The worker may not write `failure_of`, which decides which messages an erasure deletes. Only the owner of the schema
-- sets it, in the transaction that enqueues the message.
CREATE FUNCTION pgoutbox._enqueue_failure(failure jsonb, max_attempts integer)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_variable
DECLARE
    hook_id bigint;
BEGIN
    hook_id := pgoutbox.enqueue(
        topic => failure ->> 'topic' || '.failed',
        payload => failure - 'headers',
        queue => failure ->> 'queue',
        headers => nullif(failure -> 'headers', 'null'),
        max_attempts => max_attempts,
        owner => failure ->> 'owner'
    );
    UPDATE pgoutbox.message_live AS m
    SET failure_of = (failure ->> 'message_id')::bigint
    WHERE m.id = hook_id AND m.state = 'pending' AND m.failure_of IS NULL;
    RETURN hook_id;
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue_failure IS
    'Enqueue the message for the hook of a failed message, with the owner of that one. Returns its id.';
