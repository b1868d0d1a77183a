-- For each draft with a max_delay, when the first of the fresh messages that wait at its key was enqueued; now if none
-- waits. Each newer message of a coalesce key restarts its delay, up to max_delay after this time. The caller has
-- locked the keys, so their rows exist.
CREATE FUNCTION pgoutbox._waiting_since(drafts pgoutbox.draft[], known_ids bigint[])
RETURNS timestamptz[]
LANGUAGE plpgsql
AS $function$
BEGIN
    INSERT INTO pgoutbox.key_head AS head (newest_id, scope, key)
    SELECT DISTINCT 0, d.topic, d.coalesce_key
    FROM unnest(drafts) WITH ORDINALITY AS d
    WHERE d.max_delay IS NOT NULL AND known_ids[d.ordinality] IS NULL
    ON CONFLICT ON CONSTRAINT key_head_pkey DO UPDATE
    SET waiting_since = CASE
        WHEN EXISTS (
            SELECT
            FROM pgoutbox.message_live AS m
            WHERE m.id = head.replaced_id AND m.state = 'pending' AND m.attempt_count = 0
        ) THEN coalesce(head.waiting_since, now())
        ELSE now()
    END;
    RETURN ARRAY(
        SELECT (
            SELECT head.waiting_since
            FROM pgoutbox.key_head AS head
            WHERE head.scope = d.topic AND head.key = d.coalesce_key
            ORDER BY head.newest_id DESC -- An old snapshot may see a deleted row too.
            LIMIT 1
        )
        FROM unnest(drafts) WITH ORDINALITY AS d
        ORDER BY d.ordinality
    );
END
$function$;
