-- The message that supersedes another by the rule `pending`: a newer one that falls due no later, in the snapshot of
-- the calling statement (hence STABLE). It is the one that fell due last, because many messages may not be due yet. An
-- expired message supersedes nothing. The planner must read the index in this order, and stop at the first row. The id
-- plus 0 keeps it from using the primary key. With IS NOT FALSE it would expect no row.
CREATE FUNCTION pgoutbox._newer_pending(
    p_topic text, p_coalesce_key text, p_queue text, p_id bigint, due_by timestamptz DEFAULT now()
)
RETURNS bigint
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    RETURN (
        SELECT m.id
        FROM pgoutbox.message_live AS m
        WHERE m.coalesces_pending
            AND m.state OPERATOR(pg_catalog.=) 'pending'
            AND m.topic OPERATOR(pg_catalog.=) p_topic
            AND m.coalesce_key OPERATOR(pg_catalog.=) p_coalesce_key
            AND m.queue OPERATOR(pg_catalog.=) p_queue
            AND m.available_at OPERATOR(pg_catalog.<=) due_by
            AND m.id OPERATOR(pg_catalog.+) 0 OPERATOR(pg_catalog.>) p_id
            AND (m.expires_at IS NULL OR m.expires_at OPERATOR(pg_catalog.>) pg_catalog.now())
        ORDER BY m.available_at DESC, m.id DESC
        LIMIT 1
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox._newer_pending IS
    'A newer pending message of a coalesce key that supersedes this one by the rule pending; null if there is none '
    'that falls due by then.';
