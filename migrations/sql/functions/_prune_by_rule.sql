-- Delete a batch of messages that a retention rule no longer keeps and that ended within a period. Returns the state of
-- each deleted message. Apply one rule in its current version, even if it was changed after the list of rules was read.
-- A transaction that changes a rule waits for the batch, so that nothing is deleted by the old rule afterwards. A topic
-- with its own rule is exempt from the rule of all topics, also if its rule never deletes. The times select a
-- partition.
--
-- If a rule deletes sent messages at once, their dedupe keys have a rule of their own. Rows that a redrive has locked
-- are skipped.
CREATE FUNCTION pgoutbox._prune_by_rule(
    rule_topic text, rule_state text, since timestamptz, until timestamptz, at_most bigint
)
RETURNS SETOF text
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
LOCK TABLE pgoutbox.retention IN SHARE MODE;
WITH old AS MATERIALIZED (
    SELECT m.id, m.state, m.finished_at, r.state = 'sent' AND r.keep = interval '0' AS keeps_dedupe_key
    FROM pgoutbox.retention AS r
    JOIN pgoutbox.message AS m ON m.state = r.state
    WHERE r.topic = rule_topic
        AND r.state = rule_state
        AND m.state = rule_state -- Without this, each rule would read all partitions.
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at <= now() - r.keep
        AND m.finished_at >= since
        AND m.finished_at < until
        AND (
            m.topic = r.topic
            OR (
                r.topic = '*'
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention AS own WHERE own.topic = m.topic AND own.state = r.state
                )
            )
        )
    LIMIT at_most
    FOR UPDATE OF m SKIP LOCKED
), batch AS (
    SELECT
        array_agg(o.id) AS ids,
        array_agg(o.state) AS states,
        array_agg(o.finished_at) AS finished_ats,
        bool_or(o.keeps_dedupe_key) AS keeps_dedupe_keys
    FROM old AS o
)
SELECT deleted.state
FROM batch AS b
CROSS JOIN pgoutbox._delete_messages(b.ids, b.states, b.finished_ats, b.keeps_dedupe_keys) AS deleted(state)
$function$;
