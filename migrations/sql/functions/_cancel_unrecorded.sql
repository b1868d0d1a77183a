-- cancel for several messages, without the audit. A message whose row is locked at this moment may be in flight a
-- moment later. So it gets a request too, and the claim that finds the request ends the message. A caller that asks for
-- pending messages alone gets no request.
CREATE FUNCTION pgoutbox._cancel_unrecorded(message_ids bigint[], states text[])
RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
    locked constant bigint[] :=
        CASE WHEN 'pending' = ANY (states) THEN pgoutbox._lock_pending(message_ids) ELSE '{}' END;
    requested bigint[];
    freed_queue text;
BEGIN
    IF array_position(message_ids, NULL) IS NOT NULL THEN
        PERFORM pgoutbox._raise_argument_error('message_id: must not be null', in_function => 'cancel');
    END IF;
    FOR freed_queue IN
        WITH cancelled AS (
            UPDATE pgoutbox.message AS m
            SET state = 'cancelled', finished_at = clock_timestamp()
            WHERE m.id = ANY (locked) AND m.state = 'pending'
            RETURNING m.queue, m.ordering_key
        )
        SELECT DISTINCT c.queue FROM cancelled AS c WHERE c.ordering_key IS NOT NULL
    LOOP
        PERFORM pgoutbox._notify_workers(freed_queue); -- Another message may now be the first of its key.
    END LOOP;
    WITH request AS (
        INSERT INTO pgoutbox.cancel_request (message_id, message_created_at)
        SELECT m.id, m.created_at
        FROM pgoutbox.message_live AS m
        WHERE m.id = ANY (message_ids) AND m.state = ANY (states) AND 'sending' = ANY (states)
        RETURNING message_id
    )
    SELECT array_agg(r.message_id) INTO requested FROM request AS r;
    IF NOT pgoutbox._reads_committed() THEN
        -- The snapshot may be older than a redrive. Then the lock is refused, and the caller has to try again.
        PERFORM FROM pgoutbox.message AS m
        WHERE m.id = ANY (message_ids) AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        FOR KEY SHARE SKIP LOCKED;
    END IF;
    RETURN QUERY
    SELECT
        asked.id,
        CASE
            WHEN l.id IS NOT NULL THEN 'cancelled'
            WHEN r.id IS NOT NULL THEN 'requested'
            WHEN m.state = 'cancelled' THEN 'already_cancelled' -- The audit records only the first cancel.
            ELSE coalesce(m.state, 'missing')
        END
    FROM (SELECT DISTINCT a.id FROM unnest(message_ids) AS a(id)) AS asked
    LEFT JOIN unnest(locked) AS l(id) ON l.id = asked.id
    LEFT JOIN unnest(requested) AS r(id) ON r.id = asked.id
    LEFT JOIN pgoutbox.message AS m ON m.id = asked.id;
END
$function$;
