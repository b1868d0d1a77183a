-- The payload of a message after a correction: its own payload after a merge patch, or a whole payload of a later
-- version.
CREATE FUNCTION pgoutbox._corrected_payload(message pgoutbox.message, changes jsonb)
RETURNS jsonb
LANGUAGE sql
IMMUTABLE
RETURN (
    CASE
        WHEN NOT changes ? 'payload' THEN message.payload
        WHEN (changes ->> 'payload_version')::integer <> message.payload_version THEN changes -> 'payload'
        ELSE pgoutbox._after_patch(message.payload, changes -> 'payload')
    END
);
