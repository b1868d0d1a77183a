-- Delete those of the locked coalesce and ordering keys that no message needs, and the dedupe keys of missing messages.
-- Returns the message of each deleted row. The caller has locked these keys in an earlier statement, so no message of
-- them can be enqueued. The checks are those of _prune_keys. Rows can outlive their message, for example the dedupe key
-- of a message that was deleted as it was sent. This statement deletes them only if it sees no such message: one may
-- have just committed.
CREATE FUNCTION pgoutbox._erase_left_behind(head_scopes text[], head_keys text[], missing_ids bigint[])
RETURNS SETOF bigint
LANGUAGE sql
AS $function$
WITH asked AS (
    SELECT k.scope COLLATE "C" AS scope, k.key COLLATE "C" AS key FROM unnest(head_scopes, head_keys) AS k(scope, key)
), needed AS MATERIALIZED (
    -- No index has the coalesce keys of live messages.
    SELECT a.scope, a.key
    FROM pgoutbox.message_live AS m
    JOIN asked AS a ON a.scope = m.topic AND a.key = m.coalesce_key
    UNION
    SELECT a.scope, a.key
    FROM asked AS a
    WHERE (SELECT m.id FROM pgoutbox._messages_of_key(a.scope, a.key) AS m(id) LIMIT 1) IS NOT NULL
), head AS (
    DELETE FROM pgoutbox.key_head AS h
    USING asked AS a
    WHERE h.scope = a.scope
        AND h.key = a.key
        AND (h.scope, h.key) NOT IN (SELECT n.scope, n.key FROM needed AS n)
        AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.id = h.newest_id LIMIT 1) IS NULL
    RETURNING h.newest_id
), missing AS MATERIALIZED (
    SELECT a.id
    FROM unnest(missing_ids) AS a(id)
    WHERE (SELECT m.id FROM pgoutbox.message AS m WHERE m.id = a.id LIMIT 1) IS NULL
), key AS MATERIALIZED (
    -- An enqueue that has locked a key takes it over.
    SELECT d.topic, d.dedupe_key
    FROM pgoutbox.dedupe AS d
    WHERE d.message_id IN (SELECT m.id FROM missing AS m)
    FOR UPDATE SKIP LOCKED
), deduped AS (
    DELETE FROM pgoutbox.dedupe AS d
    USING key AS k
    WHERE d.topic = k.topic AND d.dedupe_key = k.dedupe_key
    RETURNING d.message_id
)
SELECT h.newest_id FROM head AS h
UNION ALL
SELECT d.message_id FROM deduped AS d
$function$;
