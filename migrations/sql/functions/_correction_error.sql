-- The first invalid field of a message after the changes of a correction, as name and reason; null if all are valid.
CREATE FUNCTION pgoutbox._correction_error(message pgoutbox.message, changes jsonb)
RETURNS text
LANGUAGE plpgsql
STABLE
AS $function$
DECLARE
    newest_version constant integer := CASE
        WHEN changes ? 'payload' AND NOT changes ? 'payload_version' THEN pgoutbox._newest_version(message.topic)
    END;
BEGIN
    RETURN CASE
        WHEN jsonb_typeof(changes) IS DISTINCT FROM 'object' OR changes = '{}'
            THEN 'changes: must be a JSON object with one of payload, headers, destination, owner and queue'
        WHEN changes - '{payload,payload_version,headers,destination,owner,queue}'::text[] <> '{}'
            THEN 'changes: must have no fields but payload, payload_version, headers, destination, owner and queue'
        WHEN jsonb_typeof(changes -> 'payload_version') <> 'number' OR changes ->> 'payload_version' !~ '^[0-9]{1,3}$'
            THEN 'payload_version: must be from 1 to 100'
        WHEN changes ? 'payload_version' AND NOT changes ? 'payload'
            THEN 'payload_version: must not be given without payload'
        WHEN jsonb_typeof(changes -> 'destination') NOT IN ('string', 'null')
            THEN 'destination: must be a text, or null for none'
        WHEN jsonb_typeof(changes -> 'owner') NOT IN ('string', 'null') THEN 'owner: must be a text, or null for none'
        WHEN jsonb_typeof(changes -> 'queue') <> 'string' THEN 'queue: must be a text'
        WHEN jsonb_typeof(changes -> 'headers') NOT IN ('object', 'null') THEN 'headers: must be a JSON object of texts'
        WHEN (changes ->> 'payload_version')::integer < message.payload_version THEN format(
            'payload_version: message %s has version %s of the payload, which is later', message.id, message.payload_version
        )
        -- The upgrade in the worker could overwrite new members.
        WHEN message.payload_version < newest_version THEN format(
            'payload: message %s has version %s of the payload, and workers know version %s; give --app with that version, '
            'or payload_version %2$s to change members of version %2$s',
            message.id, message.payload_version, newest_version
        )
        WHEN changes -> 'payload' ? 'pgoutbox.encrypted' THEN 'payload: the member pgoutbox.encrypted is reserved'
        ELSE pgoutbox._draft_error(pgoutbox._draft(
            'a',
            CASE WHEN changes ? 'payload' THEN pgoutbox._corrected_payload(message, changes) ELSE '1' END,
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
