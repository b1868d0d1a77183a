-- Whether a message was cancelled, skipped or deleted, so that the next message takes its dedupe key. The newest
-- message of its coalesce key stands for a superseded message. If the newest one is deleted, its final state is
-- unknown, so the key stays taken. Volatile, so that each look sees all earlier commits.
CREATE FUNCTION pgoutbox._has_freed_key(p_id bigint)
RETURNS boolean
LANGUAGE plpgsql
VOLATILE
AS $function$
DECLARE
    standing_id bigint;
BEGIN
    -- Separate, because most messages are found here: the queries below lock every partition against its drop.
    IF EXISTS (SELECT FROM pgoutbox.message_live AS m WHERE m.id = p_id) THEN
        RETURN false;
    END IF;
    SELECT CASE WHEN m.superseded_by IS NULL THEN m.id ELSE head.newest_id END
    INTO standing_id
    FROM pgoutbox.message AS m
    LEFT JOIN pgoutbox.key_head AS head ON head.scope = m.topic AND head.key = m.coalesce_key
    WHERE m.id = p_id;
    IF NOT FOUND THEN
        RETURN true;
    END IF;
    IF NOT pgoutbox._reads_committed() THEN
        -- The snapshot may be older than a redrive of the message. Then the lock is refused with 40001.
        PERFORM FROM pgoutbox.message AS m WHERE m.id = standing_id AND m.state IN ('cancelled', 'skipped')
        FOR KEY SHARE SKIP LOCKED;
    END IF;
    RETURN EXISTS (
        SELECT FROM pgoutbox.message AS m WHERE m.id = standing_id AND m.state IN ('cancelled', 'skipped')
    );
END
$function$;
