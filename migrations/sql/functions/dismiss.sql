-- A message can be tried again, and fail with another error, between the query of a filter and this call: then its attempt
-- count has changed. The messages behind a failed one that halts its ordering key may follow now.
CREATE FUNCTION pgoutbox.dismiss(ids bigint[], reason text, attempt_counts integer[] DEFAULT NULL)
RETURNS TABLE (id bigint, result text, state text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    actor constant text := coalesce(pgoutbox._announced() ->> 'actor', session_user);
BEGIN
    IF coalesce(length(reason), 0) NOT BETWEEN 1 AND 1000 THEN
        PERFORM pgoutbox._raise_argument_error('reason: must have 1 to 1000 characters', in_function => 'dismiss');
    END IF;
    RETURN QUERY
    WITH asked AS (
        SELECT DISTINCT ON (a.id) a.id, a.attempt_count
        FROM unnest(ids, attempt_counts) AS a(id, attempt_count)
        ORDER BY a.id
    ), locked AS MATERIALIZED (
        SELECT m.id
        FROM asked AS a
        JOIN pgoutbox.message_failed AS m ON m.id = a.id
        WHERE m.attempt_count = coalesce(a.attempt_count, m.attempt_count)
        ORDER BY m.id
        FOR UPDATE OF m SKIP LOCKED
    ), dismissed AS (
        UPDATE pgoutbox.message AS m
        SET state = 'skipped',
            finished_at = clock_timestamp(),
            skip_reason = 'dismissed by ' || actor || ': ' || reason
        FROM locked AS l
        WHERE m.id = l.id AND m.state = 'failed'
        RETURNING m.id, m.queue, m.halts_key
    ), notified AS MATERIALIZED (
        SELECT pgoutbox._wake_all_workers(q.queue)
        FROM (SELECT DISTINCT d.queue FROM dismissed AS d WHERE d.halts_key) AS q
    ), recorded AS MATERIALIZED (
        SELECT pgoutbox._record_act(
            'dismiss', message_ids => array_agg(d.id ORDER BY d.id), details => jsonb_build_object('reason', reason)
        )
        FROM dismissed AS d
        HAVING count(*) > 0
    )
    SELECT
        a.id,
        CASE
            WHEN m.id IS NULL THEN 'missing'
            WHEN m.state <> 'failed' THEN 'wrong_state'
            WHEN d.id IS NOT NULL AND (SELECT count(*) FROM notified) + (SELECT count(*) FROM recorded) > 0
                THEN 'dismissed'
            WHEN m.attempt_count <> a.attempt_count THEN 'changed'
            ELSE 'locked'
        END,
        m.state
    FROM asked AS a
    LEFT JOIN pgoutbox.message AS m ON m.id = a.id
    LEFT JOIN dismissed AS d ON d.id = a.id
    ORDER BY a.id;
END
$function$;

COMMENT ON FUNCTION pgoutbox.dismiss IS
    'End failed messages as skipped, with a reason, because nobody will deliver them. Returns for each message '
    'dismissed, or the reason why it was left alone: missing, wrong_state, changed (it was attempted again), or locked '
    '(try again). Returns also its state before.';
