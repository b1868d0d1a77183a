-- Enqueue a copy of a sent message: resent, missing, wrong_state or superseded. The other message is the copy, or the
-- newer message of its key unless that is deleted.
--
-- The head is locked first: between a look at it and the enqueue a newer message could commit. The copy, which draws
-- its id last, would then supersede it with older content. The source is locked as well: if a prune deleted it before
-- the copy commits, it would also delete the content, to which no other message refers. Only the message that the head
-- names is the newest of its key. A missing head was deleted after its newest message. A head with a smaller id was
-- inserted later, by a transaction that had drawn its id before. The state is read before the source, which is found if
-- it was sent in between. A sent message that is not found was deleted in between.
CREATE FUNCTION pgoutbox.resend(message_id bigint)
RETURNS SETOF pgoutbox.act_result
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    earlier_state constant text := pgoutbox._state_of(resend.message_id);
    newest_id bigint;
    source pgoutbox.message;
    copy_id bigint;
BEGIN
    SELECT h.newest_id
    INTO newest_id
    FROM pgoutbox.message AS m
    JOIN pgoutbox.key_head AS h ON h.scope = m.topic AND h.key = m.coalesce_key
    WHERE m.id = resend.message_id
    FOR UPDATE OF h;
    SELECT m.*
    INTO source
    FROM pgoutbox.message AS m
    WHERE m.id = resend.message_id AND m.state = 'sent'
    FOR KEY SHARE;
    IF NOT FOUND THEN
        source.state := nullif(earlier_state, 'sent');
    ELSIF source.coalesce_key IS NULL OR newest_id = source.id THEN
        -- All options that are columns of a message, but for those of its time and the dedupe key, which it has itself.
        copy_id := (pgoutbox._enqueue(
            ARRAY[pgoutbox._draft(
                source.topic,
                source.payload,
                to_jsonb(source) - '{topic,payload,dedupe_key,available_at,expires_at}'::text[]
                    || jsonb_build_object('max_attempts', source.attempt_budget)
            )],
            true, content_id => source.content_id, resend_of => source.id, failure_of => source.failure_of
        ))[1];
        PERFORM pgoutbox._record_act(
            'resend', message_ids => ARRAY[source.id], details => jsonb_build_object('copy', copy_id)
        );
    END IF;
    RETURN QUERY SELECT
        resend.message_id,
        CASE
            WHEN source.state IS NULL THEN 'missing'
            WHEN source.id IS NULL THEN 'wrong_state'
            WHEN copy_id IS NULL THEN 'superseded'
            ELSE 'resent'
        END,
        source.state,
        CASE WHEN source.id IS NOT NULL THEN coalesce(copy_id, nullif(newest_id, source.id)) END;
END
$function$;
