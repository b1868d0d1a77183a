-- Delete unneeded keys from one page of the table, in the order of the primary key, and return the end of the page. The
-- cost depends on the size of the page, not of the table. Each check of a key is a scalar subquery, because the planner
-- could turn an EXISTS into a hash of all messages. Sequential scans are off, so that no small partition is read as a
-- whole, once for each key.
--
-- A key is unneeded if its message is deleted. No other message can take over such a key, so it is unchanged when it is
-- locked. Topics begin with a letter, so a brace sorts after all of them.
CREATE FUNCTION pgoutbox._delete_dedupe_keys(
    only_topic text, created_by timestamptz, spares_topics_with_rules boolean, at_most bigint, after_topic text,
    after_key text
)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
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
    WHERE d.created_at <= created_by
        AND (
            NOT spares_topics_with_rules
            OR NOT EXISTS (
                SELECT FROM pgoutbox.retention AS own WHERE own.topic = d.topic AND own.state = 'dedupe_key'
            )
        )
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

COMMENT ON FUNCTION pgoutbox._delete_dedupe_keys IS
    'Delete the dedupe keys of one page that are old enough and whose message is deleted.';
