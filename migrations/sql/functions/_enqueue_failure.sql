-- Enqueue the message for the hook of a failed message, with the owner of that one. Returns its id. The worker may not
-- write `failure_of`, which decides which messages an erasure deletes. Only the owner of the schema sets it, in the
-- transaction that enqueues the message.
CREATE FUNCTION pgoutbox._enqueue_failure(failure jsonb, max_attempts integer)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    draft constant pgoutbox.draft := pgoutbox._draft(
        failure ->> 'topic' || '.failed',
        failure - 'headers',
        jsonb_build_object(
            'queue', failure -> 'queue', 'owner', failure -> 'owner', 'headers', failure -> 'headers',
            'max_attempts', max_attempts
        )
    );
BEGIN
    RETURN (pgoutbox._enqueue(ARRAY[draft], true, failure_of => (failure ->> 'message_id')::bigint))[1];
END
$function$;
