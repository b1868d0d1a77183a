-- Delete a batch of messages that have been final for longer than an interval, with their dedupe keys. Returns the
-- state of each deleted message.
--
-- Rows that a redrive has locked are skipped.
CREATE FUNCTION pgoutbox.prune(states text[], older_than interval, only_topic text, at_most bigint)
RETURNS SETOF text
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
WITH old AS MATERIALIZED (
    SELECT m.id, m.state, m.finished_at
    FROM pgoutbox.message AS m
    WHERE m.state = ANY (states)
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at < now() - older_than
        AND (only_topic IS NULL OR m.topic = only_topic)
    LIMIT at_most
    FOR UPDATE OF m SKIP LOCKED
), batch AS (
    SELECT array_agg(o.id) AS ids, array_agg(o.state) AS states, array_agg(o.finished_at) AS finished_ats
    FROM old AS o
)
SELECT deleted.state
FROM batch AS b
CROSS JOIN pgoutbox._delete_messages(b.ids, b.states, b.finished_ats, false) AS deleted(state)
$function$;
