-- _newer_pending for a claim. The lock keeps the newer message pending until the claim commits, so an attempt for the
-- key begins after this claim (docs/decisions/0021). Zero if another session has locked or changed the newer message.
CREATE FUNCTION pgoutbox._lock_newer_pending(p_topic text, p_coalesce_key text, p_queue text, p_id bigint)
RETURNS bigint
LANGUAGE plpgsql
VOLATILE
AS $function$
DECLARE
    newer_id constant bigint := pgoutbox._newer_pending(p_topic, p_coalesce_key, p_queue, p_id);
BEGIN
    IF newer_id IS NULL THEN
        RETURN NULL;
    END IF;
    PERFORM
    FROM pgoutbox.message_live AS m
    WHERE m.id OPERATOR(pg_catalog.=) newer_id
        AND m.state OPERATOR(pg_catalog.=) 'pending'
        AND m.available_at OPERATOR(pg_catalog.<=) pg_catalog.now()
    FOR SHARE SKIP LOCKED;
    RETURN CASE WHEN FOUND THEN newer_id ELSE 0 END;
END
$function$;

COMMENT ON FUNCTION pgoutbox._lock_newer_pending IS
    'The same for a claim, locked and still pending; zero if another session has locked it.';
