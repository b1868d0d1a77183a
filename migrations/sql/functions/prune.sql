CREATE FUNCTION pgoutbox.prune(states text[], older_than interval, only_topic text, at_most bigint)
RETURNS SETOF text
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
WITH old AS MATERIALIZED (
    SELECT m.id, m.finished_at, m.state, m.topic, m.dedupe_key, m.payload IS NULL AS has_large_payload,
        false AS keeps_dedupe_key
    FROM pgoutbox.message AS m
    WHERE m.state = ANY (states)
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at < now() - older_than
        AND (only_topic IS NULL OR m.topic = only_topic)
    LIMIT at_most
    FOR UPDATE OF m SKIP LOCKED
), history AS (
    DELETE FROM pgoutbox.attempt AS a
    USING old AS o
    WHERE a.message_id = o.id
), large AS (
    -- After a sequence was set back, another message may have the same id. Only one without a payload has a row here.
    DELETE FROM pgoutbox.large_payload AS l
    USING old AS o
    WHERE l.message_id = o.id AND o.has_large_payload
), keys AS (
    DELETE FROM pgoutbox.dedupe AS d
    USING old AS o
    WHERE d.topic = o.topic AND d.dedupe_key = o.dedupe_key AND d.message_id = o.id AND NOT o.keeps_dedupe_key
), gone AS (
    DELETE FROM pgoutbox.message AS m
    USING old AS o
    WHERE m.id = o.id
        AND m.finished_at = o.finished_at -- The time selects the partition.
        AND m.state = o.state
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    RETURNING m.state, m.queue, m.on_failed
), rung AS MATERIALIZED (
    SELECT pgoutbox.ring(q.queue)
    FROM (SELECT DISTINCT g.queue FROM gone AS g WHERE g.state = 'failed' AND g.on_failed = 'halt') AS q
), recorded AS MATERIALIZED (
    SELECT pgoutbox.record_act('prune', message_count => count(*)::integer)
    FROM gone AS g
    HAVING count(*) > 0 AND pgoutbox.is_act()
)
SELECT g.state
FROM gone AS g
WHERE (SELECT count(*) FROM rung) >= 0 AND (SELECT count(*) FROM recorded) >= 0
$function$;

COMMENT ON FUNCTION pgoutbox.prune IS
    'Delete a batch of messages that have been final for longer than an interval, with attempts, large payloads and '
    'dedupe keys. Returns the state of each deleted message.';
