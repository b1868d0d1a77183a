-- The head is locked first: between a look at it and the enqueue a newer message could commit. The copy, which draws
-- its id last, would then supersede it with older content. The source is locked as well: if a prune deleted it before
-- the copy commits, it would also delete the content, to which no other message refers. Only the message that the head
-- names is the newest of its key. A missing head was deleted after its newest message. A head with a smaller id was
-- inserted later, by a transaction that had drawn its id before.
CREATE FUNCTION pgoutbox.resend(message_id bigint)
RETURNS TABLE (id bigint, state text, superseded_by bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    shared_id bigint;
    failed_id bigint;
BEGIN
    WITH source AS MATERIALIZED (
        SELECT m.id
        FROM pgoutbox.message AS m
        WHERE m.id = resend.message_id AND m.state = 'sent'
        FOR KEY SHARE OF m
    ), head AS MATERIALIZED (
        SELECT c.newest_id
        FROM pgoutbox.message AS m
        JOIN pgoutbox.coalesce_head AS c ON c.topic = m.topic AND c.coalesce_key = m.coalesce_key
        WHERE m.id = resend.message_id
        FOR UPDATE OF c
    )
    SELECT
        copy.id, m.state, CASE WHEN copy.id IS NULL AND head.newest_id <> m.id THEN head.newest_id END, m.content_id,
        m.failure_of
    INTO resend.id, resend.state, resend.superseded_by, shared_id, failed_id
    FROM pgoutbox.message AS m
    LEFT JOIN head ON true
    LEFT JOIN LATERAL (
        SELECT pgoutbox.enqueue(
            topic => m.topic,
            payload => m.payload,
            queue => m.queue,
            destination => m.destination,
            coalesce_key => m.coalesce_key,
            headers => m.headers,
            max_attempts => m.attempt_budget,
            ordering_key => m.ordering_key,
            on_failed => m.on_failed,
            owner => m.owner
        ) AS id
        WHERE m.state = 'sent' AND (m.coalesce_key IS NULL OR head.newest_id = m.id)
    ) AS copy ON true
    WHERE m.id = resend.message_id
        AND (m.state <> 'sent' OR EXISTS (SELECT FROM source AS s WHERE s.id = m.id));
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- The copy is visible only to this transaction.
    UPDATE pgoutbox.message_live AS m
    SET resend_of = resend.message_id,
        content_id = shared_id,
        failure_of = failed_id
    WHERE m.id = resend.id AND m.state = 'pending' AND m.resend_of IS NULL;
    IF resend.id IS NOT NULL THEN
        PERFORM pgoutbox._record_act(
            'resend', message_ids => ARRAY[resend.message_id], details => jsonb_build_object('copy', resend.id)
        );
    END IF;
    RETURN NEXT;
END
$function$;

COMMENT ON FUNCTION pgoutbox.resend IS
    'Enqueue a copy of a sent message. Returns the id of the copy, or null with the state that prevents a copy or the '
    'newer message. If that newer message is deleted, only the state is not null. Returns no row if the message does '
    'not exist.';
