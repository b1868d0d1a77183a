-- Delete final messages and, unless it keeps them, their dedupe keys. Returns their states. The caller has locked the
-- messages. A deleted message no longer halts its ordering key, so the workers of its queue are woken.
CREATE FUNCTION pgoutbox._delete_messages(
    ids bigint[], states text[], finished_ats timestamptz[], keeps_dedupe_keys boolean
)
RETURNS SETOF text
LANGUAGE sql
-- The ids are few beside the tables: their indexes find the rows, and a hash join would read all keys each time.
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
WITH gone AS (
    DELETE FROM pgoutbox.message AS m
    USING unnest(ids, states, finished_ats) AS o(id, state, finished_at)
    WHERE m.id = o.id
        AND m.finished_at = o.finished_at -- The time selects the partition.
        AND m.state = o.state
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    RETURNING m.id, m.state, m.topic, m.queue, m.halts_key, m.dedupe_key, m.owner
), key AS MATERIALIZED (
    -- An enqueue that has locked a key takes it over.
    SELECT d.topic, d.dedupe_key
    FROM gone AS g
    JOIN pgoutbox.dedupe AS d ON d.topic = g.topic AND d.dedupe_key = g.dedupe_key
    WHERE d.message_id = g.id AND NOT keeps_dedupe_keys
    FOR UPDATE OF d SKIP LOCKED
), freed AS (
    DELETE FROM pgoutbox.dedupe AS d
    USING key AS k
    WHERE d.topic = k.topic AND d.dedupe_key = k.dedupe_key
), kept AS (
    UPDATE pgoutbox.dedupe AS d
    SET is_kept = true, owner = g.owner
    FROM gone AS g
    WHERE d.topic = g.topic AND d.dedupe_key = g.dedupe_key AND d.message_id = g.id AND keeps_dedupe_keys
), notified AS MATERIALIZED (
    SELECT pgoutbox._notify_workers(q.queue)
    FROM (SELECT DISTINCT g.queue FROM gone AS g WHERE g.state = 'failed' AND g.halts_key) AS q
), recorded AS MATERIALIZED (
    SELECT pgoutbox._record_act('prune', message_count => count(*)::integer)
    FROM gone AS g
    HAVING count(*) > 0 AND pgoutbox._is_act()
)
SELECT g.state
FROM gone AS g
WHERE (SELECT count(*) FROM notified) >= 0 AND (SELECT count(*) FROM recorded) >= 0
$function$;
