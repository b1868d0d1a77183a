-- A superseded message keeps its key: the newer message replaces it. The final state of a deleted message is unknown,
-- so it keeps its key too. Volatile, so that each look sees all earlier commits.
CREATE FUNCTION pgoutbox._has_freed_key(p_id bigint)
RETURNS boolean
LANGUAGE plpgsql
VOLATILE
AS $function$
BEGIN
    -- Separate, because most messages are found here: the query below locks every partition against its retirement.
    IF EXISTS (SELECT FROM pgoutbox.message_live AS m WHERE m.id = p_id) THEN
        RETURN false;
    END IF;
    IF NOT pgoutbox._reads_committed() THEN
        -- The snapshot may be older than a redrive of the message. Then the lock is refused with 40001.
        PERFORM FROM pgoutbox.message AS m WHERE m.id = p_id AND m.state IN ('cancelled', 'skipped')
        FOR KEY SHARE SKIP LOCKED;
    END IF;
    RETURN EXISTS (
        SELECT
        FROM pgoutbox.message AS m
        WHERE m.id = p_id AND m.state IN ('cancelled', 'skipped') AND m.superseded_by IS NULL
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox._has_freed_key IS
    'Whether a message was cancelled or skipped, so that the next message takes its dedupe key.';
