-- Why these changes of a correction do not fit a message: encrypted or ordered; null if they do. An encrypted payload is
-- bound to its destination, except that of a fan-out; the message for a hook contains the payload of the failed message.
-- The place of a message in its ordering key belongs to its queue.
CREATE FUNCTION pgoutbox._correction_bar(message pgoutbox.message, changes jsonb)
RETURNS text
LANGUAGE sql
IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT CASE
    WHEN (
        changes ? 'payload' OR (changes ? 'destination' AND message.content_id IS NULL)
    ) AND (
        message.payload #> CASE WHEN message.failure_of IS NULL THEN '{}' ELSE '{payload}' END::text[]
    ) ? 'pgoutbox.encrypted' IS TRUE THEN 'encrypted'
    WHEN changes ? 'queue' AND message.ordering_key IS NOT NULL AND changes ->> 'queue' <> message.queue THEN 'ordered'
END
$function$;
