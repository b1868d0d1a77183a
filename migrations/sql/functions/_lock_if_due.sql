-- A claim locks the newer message that supersedes another by the rule `pending`. The newer message stays pending until
-- the claim commits, so an attempt for the key begins after this claim (docs/decisions/0021).
CREATE FUNCTION pgoutbox._lock_if_due(p_id bigint)
RETURNS boolean
LANGUAGE plpgsql
VOLATILE
AS $function$
BEGIN
    PERFORM
    FROM pgoutbox.message_live AS m
    WHERE m.id OPERATOR(pg_catalog.=) p_id
        AND m.state OPERATOR(pg_catalog.=) 'pending'
        AND m.available_at OPERATOR(pg_catalog.<=) pg_catalog.now()
    FOR SHARE SKIP LOCKED;
    RETURN FOUND;
END
$function$;

COMMENT ON FUNCTION pgoutbox._lock_if_due IS
    'Lock a message against changes, if it is pending and due. False if not, or if another session has locked it.';
