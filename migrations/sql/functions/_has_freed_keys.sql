-- Whether one of the keys is free again, because its message was cancelled, skipped or deleted.
CREATE FUNCTION pgoutbox._has_freed_keys(topics text[], dedupe_keys text[])
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM unnest(topics, dedupe_keys) AS k(topic, dedupe_key)
        JOIN pgoutbox.dedupe AS d ON d.topic = k.topic AND d.dedupe_key = k.dedupe_key
        WHERE NOT d.is_kept AND pgoutbox._has_freed_key(d.message_id)
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox._has_freed_keys IS
    'Whether _has_freed_key is true for the message of one of these dedupe keys.';
