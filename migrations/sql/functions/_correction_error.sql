-- The first invalid field of a message after the changes of a correction, as name and reason; null if all are valid.
CREATE FUNCTION pgoutbox._correction_error(message pgoutbox.message, changes jsonb)
RETURNS text
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    RETURN CASE
        WHEN jsonb_typeof(changes) IS DISTINCT FROM 'object' OR changes = '{}'
            THEN 'changes: must be a JSON object with one of payload, headers, destination, owner and queue'
        WHEN changes - '{payload,headers,destination,owner,queue}'::text[] <> '{}'
            THEN 'changes: must have no fields but payload, headers, destination, owner and queue'
        WHEN jsonb_typeof(changes -> 'destination') NOT IN ('string', 'null')
            THEN 'destination: must be a text, or null for none'
        WHEN jsonb_typeof(changes -> 'owner') NOT IN ('string', 'null') THEN 'owner: must be a text, or null for none'
        WHEN jsonb_typeof(changes -> 'queue') <> 'string' THEN 'queue: must be a text'
        WHEN jsonb_typeof(changes -> 'headers') NOT IN ('object', 'null') THEN 'headers: must be a JSON object of texts'
        WHEN changes -> 'payload' ? 'pgoutbox.encrypted' THEN 'payload: the member pgoutbox.encrypted is reserved'
        ELSE pgoutbox._draft_error(pgoutbox._draft(
            'a',
            CASE
                WHEN changes ? 'payload' THEN pgoutbox._after_patch(message.payload, changes -> 'payload') ELSE '1'
            END,
            changes - 'payload' - 'headers' || CASE
                WHEN changes ? 'headers' THEN jsonb_build_object(
                    'headers', nullif(pgoutbox._after_patch(message.headers, changes -> 'headers'), 'null')
                )
                ELSE '{}'
            END
        ))
    END;
END
$function$;
