-- A row that is locked is left alone. The result has for each id the state before, and the newer message if it is
-- superseded.
CREATE FUNCTION pgoutbox.reschedule(ids bigint[], available_at timestamptz DEFAULT NULL)
RETURNS TABLE (id bigint, result text, state text, superseded_by bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC' -- The details of the act do not depend on the session.
AS $function$
#variable_conflict use_column
DECLARE
    due_at constant timestamptz := greatest(reschedule.available_at, now());
    pending_ids bigint[];
BEGIN
    IF reschedule.available_at IS NOT NULL
        AND (NOT isfinite(reschedule.available_at) OR reschedule.available_at > now() + interval '10 years')
    THEN
        PERFORM pgoutbox._raise_argument_error(
            'available_at: must be finite and not more than 10 years ahead', in_function => 'reschedule'
        );
    END IF;
    pending_ids := pgoutbox._lock_pending(ids);
    RETURN QUERY
    WITH asked AS (
        SELECT DISTINCT a.id FROM unnest(ids) AS a(id)
    ), locked AS MATERIALIZED (
        SELECT m.id, head.newest_id
        FROM unnest(pending_ids) AS p(id)
        JOIN pgoutbox.message_live AS m ON m.id = p.id
        LEFT JOIN pgoutbox.key_head AS head ON head.scope = m.topic AND head.key = m.coalesce_key
    ), rescheduled AS (
        UPDATE pgoutbox.message_live AS m
        SET available_at = due_at
        FROM locked AS l
        WHERE m.id = l.id
            AND m.state = 'pending'
            AND coalesce(l.newest_id <= m.id, true)
            AND coalesce(m.expires_at > due_at, true)
        RETURNING m.id, m.queue
    ), notified AS MATERIALIZED (
        SELECT pgoutbox._wake_all_workers(q.queue)
        FROM (SELECT DISTINCT r.queue FROM rescheduled AS r) AS q
    ), recorded AS MATERIALIZED (
        SELECT pgoutbox._record_act(
            'reschedule',
            message_ids => array_agg(r.id ORDER BY r.id),
            details => jsonb_build_object('available_at', due_at)
        )
        FROM rescheduled AS r
        HAVING count(*) > 0 AND pgoutbox._is_act()
    )
    SELECT
        a.id,
        CASE
            WHEN m.id IS NULL THEN 'missing'
            WHEN m.state <> 'pending' THEN 'wrong_state'
            WHEN r.id IS NOT NULL AND (SELECT count(*) FROM notified) + (SELECT count(*) FROM recorded) > 0
                THEN 'rescheduled'
            WHEN head.newest_id > a.id THEN 'superseded'
            WHEN m.expires_at <= due_at THEN 'expires'
            ELSE 'locked'
        END,
        m.state,
        CASE WHEN head.newest_id > a.id THEN head.newest_id END
    FROM asked AS a
    LEFT JOIN pgoutbox.message AS m ON m.id = a.id
    LEFT JOIN pgoutbox.key_head AS head ON head.scope = m.topic AND head.key = m.coalesce_key
    LEFT JOIN rescheduled AS r ON r.id = a.id
    ORDER BY a.id;
END
$function$;

COMMENT ON FUNCTION pgoutbox.reschedule IS
    'Make pending messages due at a time, or at once. Returns for each message rescheduled, or the reason why it was '
    'left alone: missing, wrong_state, superseded, expires (it would expire before that time), or locked (try again). '
    'Returns also its state before, and the newer message if it is superseded.';
