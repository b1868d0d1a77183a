-- Delete messages as they are sent, if a retention rule deletes them at once and the attempt is in flight. Returns the
-- ids of the deleted messages. A worker has no privilege to delete.
CREATE FUNCTION pgoutbox._forget_sent(
    ids bigint[], attempt_counts integer[], claimed_ats timestamptz[], worker text
)
RETURNS SETOF bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT m.id, m.attempt_count, m.claimed_at, m.topic
        FROM unnest(ids, attempt_counts, claimed_ats) AS o(id, attempt_count, claimed_at)
        JOIN pgoutbox.message_live AS m ON m.id = o.id
        WHERE m.attempt_count = o.attempt_count AND m.claimed_at = o.claimed_at AND m.worker = _forget_sent.worker
    ), forgetful AS MATERIALIZED (
        SELECT t.topic
        FROM (SELECT DISTINCT a.topic FROM asked AS a) AS t
        WHERE (
                -- Not _keep_of: its call would read two more pages for each message.
                SELECT r.keep
                FROM pgoutbox.retention AS r
                WHERE r.topic IN (t.topic, '*') AND r.state = 'sent'
                ORDER BY r.topic = '*'
                LIMIT 1
            ) = interval '0'
    ), forgotten AS (
        DELETE FROM pgoutbox.message_live AS m
        USING asked AS a
        WHERE m.id = a.id
            AND m.state = 'sending'
            AND m.attempt_count = a.attempt_count
            AND m.claimed_at = a.claimed_at
            AND m.worker = _forget_sent.worker
            AND a.topic = ANY (ARRAY(SELECT f.topic FROM forgetful AS f))
        RETURNING m.id, m.topic, m.dedupe_key, m.owner
    ), kept AS (
        -- The dedupe key outlives its message. An erasure of the owner must find it.
        UPDATE pgoutbox.dedupe AS d
        SET is_kept = true, owner = f.owner
        FROM forgotten AS f
        WHERE d.topic = f.topic AND d.dedupe_key = f.dedupe_key AND d.message_id = f.id
    )
    SELECT f.id
    FROM forgotten AS f;
END
$function$;
