-- Delete unneeded dedupe keys from one page of the table, in the order of the primary key, and return the end of the
-- page. The cost depends on the size of the page, not of the table. Each check of a key is a scalar subquery, because
-- the planner could turn an EXISTS into a hash of all messages. Sequential scans are off, so that no small partition is
-- read as a whole, once for each key.
--
-- A key is unneeded if its message is deleted, unless it is kept: then its rule decides, or the age if one is given. A
-- message that takes over the key meanwhile has changed it, so the lock looks at it again. Topics begin with a letter,
-- so a brace sorts after all of them.
CREATE FUNCTION pgoutbox._delete_dedupe_keys(
    only_topic text, created_by timestamptz, at_most bigint, after_topic text, after_key text
)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SET enable_seqscan = off
SET jit = off
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
    JOIN pgoutbox.dedupe AS d ON d.topic = p.topic AND d.dedupe_key = p.dedupe_key AND d.message_id = p.message_id
    WHERE CASE
            WHEN created_by IS NOT NULL THEN d.created_at <= created_by
            ELSE NOT d.is_kept OR d.created_at <= now() - pgoutbox._keep_of(d.topic, 'dedupe_key')
        END
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
