-- Enqueue a copy of a sent message: resent, missing, wrong_state or superseded. The other message is the copy, or the
-- newer message of its key unless that is deleted.
--
-- The head is locked first: between a look at it and the enqueue a newer message could commit. The copy, which draws
-- its id last, would then supersede it with older content. The source is locked as well: if a prune deleted it before
-- the copy commits, it would also delete the content, to which no other message refers. Only the message that the head
-- names is the newest of its key. A missing head was deleted after its newest message. A head with a smaller id was
-- inserted later, by a transaction that had drawn its id before.
CREATE FUNCTION pgoutbox.resend(message_id bigint)
RETURNS SETOF pgoutbox.act_result
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    found record;
BEGIN
    WITH source AS MATERIALIZED (
        SELECT m.id
        FROM pgoutbox.message AS m
        WHERE m.id = resend.message_id AND m.state = 'sent'
        FOR KEY SHARE OF m
    ), head AS MATERIALIZED (
        SELECT h.newest_id
        FROM pgoutbox.message AS m
        JOIN pgoutbox.key_head AS h ON h.scope = m.topic AND h.key = m.coalesce_key
        WHERE m.id = resend.message_id
        FOR UPDATE OF h
    )
    SELECT m.state, copy.id AS copy_id, nullif(head.newest_id, m.id) AS newer_id
    INTO found
    FROM pgoutbox.message AS m
    LEFT JOIN head ON true
    LEFT JOIN LATERAL (
        -- All options that are columns of a message, but for those of its time and the dedupe key, which it has itself.
        SELECT (pgoutbox._enqueue(
            ARRAY[pgoutbox._draft(
                m.topic,
                m.payload,
                to_jsonb(m) - '{topic,payload,dedupe_key,available_at,expires_at}'::text[]
                || jsonb_build_object('max_attempts', m.attempt_budget)
            )],
            true, content_id => m.content_id, resend_of => m.id, failure_of => m.failure_of
        ))[1] AS id
        WHERE m.state = 'sent' AND (m.coalesce_key IS NULL OR head.newest_id = m.id)
    ) AS copy ON true
    WHERE m.id = resend.message_id
        AND (m.state <> 'sent' OR EXISTS (SELECT FROM source AS s WHERE s.id = m.id));
    IF found.copy_id IS NOT NULL THEN
        PERFORM pgoutbox._record_act(
            'resend', message_ids => ARRAY[resend.message_id], details => jsonb_build_object('copy', found.copy_id)
        );
    END IF;
    RETURN QUERY SELECT
        resend.message_id,
        CASE
            WHEN found.state IS NULL THEN 'missing'
            WHEN found.state <> 'sent' THEN 'wrong_state'
            WHEN found.copy_id IS NULL THEN 'superseded'
            ELSE 'resent'
        END,
        found.state,
        CASE WHEN found.state = 'sent' THEN coalesce(found.copy_id, found.newer_id) END;
END
$function$;
