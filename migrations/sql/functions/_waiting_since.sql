-- Each newer message of a coalesce key restarts its delay, up to max_delay after this time. The keys are locked.
CREATE FUNCTION pgoutbox._waiting_since(drafts pgoutbox.draft[], known_ids bigint[])
RETURNS timestamptz[]
LANGUAGE plpgsql
AS $function$
BEGIN
    UPDATE pgoutbox.key_head AS head
    SET waiting_since = CASE
        WHEN EXISTS (
            SELECT
            FROM pgoutbox.message_live AS m
            WHERE m.id = head.replaced_id AND m.state = 'pending' AND m.attempt_count = 0
        ) THEN coalesce(head.waiting_since, now())
        ELSE now()
    END
    FROM (
        SELECT DISTINCT d.topic, d.coalesce_key
        FROM unnest(drafts) WITH ORDINALITY AS d
        WHERE d.max_delay IS NOT NULL AND known_ids[d.ordinality] IS NULL
    ) AS k
    WHERE head.scope = k.topic AND head.key = k.coalesce_key;
    RETURN ARRAY(
        SELECT (
            SELECT head.waiting_since
            FROM pgoutbox.key_head AS head
            WHERE head.scope = d.topic AND head.key = d.coalesce_key
        )
        FROM unnest(drafts) WITH ORDINALITY AS d
        ORDER BY d.ordinality
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox._waiting_since IS
    'For each draft with a max_delay, when the first of the fresh messages that wait at its key was enqueued; now if none '
    'waits.';
