-- The page of prune_dedupe_by_rule, by age alone, for a prune without rules.
CREATE FUNCTION pgoutbox._prune_dedupe(
    older_than interval, only_topic text, at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT ''
)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
WITH page AS MATERIALIZED (
    SELECT d.topic, d.dedupe_key, d.message_id
    FROM pgoutbox.dedupe AS d
    WHERE (d.topic, d.dedupe_key) > (after_topic, after_key)
        AND d.topic >= coalesce(nullif(only_topic, '*'), '')
        AND d.topic <= coalesce(nullif(only_topic, '*'), '{')
    ORDER BY d.topic, d.dedupe_key
    LIMIT at_most
), locked AS MATERIALIZED (
    SELECT d.topic, d.dedupe_key
    FROM page AS p
    JOIN pgoutbox.dedupe AS d ON d.topic = p.topic AND d.dedupe_key = p.dedupe_key
    WHERE d.created_at < now() - older_than
        AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.id = p.message_id LIMIT 1) IS NULL
    FOR UPDATE OF d SKIP LOCKED
), forgotten AS (
    DELETE FROM pgoutbox.dedupe AS d
    USING locked AS l
    WHERE d.topic = l.topic AND d.dedupe_key = l.dedupe_key
    RETURNING d.message_id
)
SELECT p.topic, p.dedupe_key, (SELECT count(*) FROM page), (SELECT count(*) FROM forgotten)
FROM page AS p
ORDER BY p.topic DESC, p.dedupe_key DESC
LIMIT 1
$function$;

COMMENT ON FUNCTION pgoutbox._prune_dedupe IS 'Delete the old dedupe keys of one page whose message is deleted.';
