-- A message can change between the query of a filter and this call: an operator cancelled a failed message, or it was
-- tried again and failed with another error, perhaps with an unknown outcome. The caller did not ask for these messages.
CREATE FUNCTION pgoutbox.redrive(
    ids bigint[], states text[] DEFAULT '{failed,cancelled}', attempt_counts integer[] DEFAULT NULL
)
RETURNS TABLE (
    id bigint, result text, state text, superseded_by bigint, attempt_count integer, dedupe_key_of bigint
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
BEGIN
    -- A key whose message is deleted is free. One that an enqueue has taken meanwhile has another message, and stays.
    WITH free AS MATERIALIZED (
        SELECT d.topic, d.dedupe_key, d.message_id
        FROM pgoutbox.message AS m
        JOIN pgoutbox.dedupe AS d ON d.topic = m.topic AND d.dedupe_key = m.dedupe_key
        WHERE m.id = ANY (ids)
            AND d.message_id <> m.id
            AND NOT d.is_kept
            AND (SELECT o.id FROM pgoutbox.message AS o WHERE o.id = d.message_id LIMIT 1) IS NULL
        FOR UPDATE OF d SKIP LOCKED
    )
    DELETE FROM pgoutbox.dedupe AS d
    USING free AS f
    WHERE d.topic = f.topic AND d.dedupe_key = f.dedupe_key AND d.message_id = f.message_id;
    RETURN QUERY
    WITH asked AS (
        SELECT DISTINCT ON (a.id) a.id, a.attempt_count
        FROM unnest(ids, attempt_counts) AS a(id, attempt_count)
        ORDER BY a.id
    ), locked AS MATERIALIZED (
        SELECT m.id, m.state, m.topic, m.dedupe_key, head.newest_id
        FROM asked AS a
        JOIN pgoutbox.message AS m ON m.id = a.id
        LEFT JOIN pgoutbox.key_head AS head ON head.scope = m.topic AND head.key = m.coalesce_key
        WHERE m.state IN ('failed', 'cancelled')
            AND m.state = ANY (redrive.states)
            AND m.attempt_count = coalesce(a.attempt_count, m.attempt_count)
        ORDER BY m.id
        FOR UPDATE OF m SKIP LOCKED
    ), keyed AS MATERIALIZED (
        -- enqueue gives the dedupe key of a cancelled message to the next one while it holds this lock.
        SELECT l.id
        FROM locked AS l
        JOIN pgoutbox.dedupe AS d ON d.topic = l.topic AND d.dedupe_key = l.dedupe_key
        WHERE d.message_id = l.id
        FOR UPDATE OF d SKIP LOCKED
    ), rekeyed AS (
        -- The message that took over the key may be deleted, and its key too.
        INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest)
        SELECT l.id, l.topic, l.dedupe_key, (pgoutbox._payload_digests(m.payload))[1]
        FROM locked AS l
        JOIN pgoutbox.message AS m ON m.id = l.id AND m.state = l.state
        WHERE l.dedupe_key IS NOT NULL
            AND NOT EXISTS (
                SELECT FROM pgoutbox.dedupe AS d WHERE d.topic = l.topic AND d.dedupe_key = l.dedupe_key
            )
        ORDER BY l.id DESC
        ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING
        RETURNING message_id
    ), redriven AS (
        UPDATE pgoutbox.message AS m
        SET state = 'pending',
            available_at = now(),
            finished_at = NULL,
            lane = least(m.attempt_count, 1),
            max_attempts = m.attempt_count + m.attempt_budget,
            -- The time in which nobody could read its payload begins again: its next refusal is an entry of its own.
            attempts = CASE
                WHEN (m.attempts #>> '{-1,outcome}', m.attempts #>> '{-1,reason_code}') = ('snoozed', 'unreadable')
                    THEN jsonb_set(m.attempts, '{-1,outcome}', to_jsonb(m.state))
                ELSE m.attempts
            END
        FROM locked AS l
        WHERE m.id = l.id
            AND m.state = l.state
            AND m.state IN ('failed', 'cancelled')
            AND coalesce(l.newest_id <= m.id, true)
            AND (
                l.dedupe_key IS NULL
                OR EXISTS (SELECT FROM keyed AS k WHERE k.id = l.id)
                OR EXISTS (SELECT FROM rekeyed AS k WHERE k.message_id = l.id)
            )
        RETURNING m.id, m.queue
    ), forgotten AS (
        DELETE FROM pgoutbox.cancel_request AS c USING redriven AS r WHERE c.message_id = r.id
    ), notified AS MATERIALIZED (
        SELECT pgoutbox._wake_all_workers(q.queue)
        FROM (SELECT DISTINCT r.queue FROM redriven AS r) AS q
    ), recorded AS MATERIALIZED (
        SELECT pgoutbox._record_act('redrive', message_ids => array_agg(r.id ORDER BY r.id))
        FROM redriven AS r
        HAVING count(*) > 0
    )
    SELECT
        a.id,
        CASE
            WHEN r.id IS NOT NULL AND (SELECT count(*) FROM notified) + (SELECT count(*) FROM recorded) > 0 THEN 'redriven'
            WHEN m.id IS NULL THEN 'missing'
            WHEN m.state <> ALL (redrive.states) OR m.state NOT IN ('failed', 'cancelled') THEN 'wrong_state'
            WHEN m.attempt_count <> a.attempt_count THEN 'changed'
            WHEN head.newest_id > a.id THEN 'superseded'
            WHEN d.message_id <> a.id THEN 'dedupe_key_taken'
            ELSE 'locked'
        END,
        m.state,
        CASE WHEN head.newest_id > a.id THEN head.newest_id END,
        m.attempt_count,
        CASE WHEN d.message_id <> a.id THEN d.message_id END
    FROM asked AS a
    LEFT JOIN pgoutbox.message AS m ON m.id = a.id
    LEFT JOIN pgoutbox.key_head AS head ON head.scope = m.topic AND head.key = m.coalesce_key
    LEFT JOIN pgoutbox.dedupe AS d ON d.topic = m.topic AND d.dedupe_key = m.dedupe_key
    LEFT JOIN redriven AS r ON r.id = a.id
    ORDER BY a.id;
END
$function$;

COMMENT ON FUNCTION pgoutbox.redrive IS
    'Make failed and cancelled messages pending again, if they are in one of the states and, if given, at these '
    'attempts. Returns for each message redriven, or the reason why it was left alone: missing, wrong_state, changed (it '
    'was attempted again), superseded, dedupe_key_taken, or locked (try again). Returns also its state before, the newer '
    'message if it is superseded, its attempt count, and the message that has its dedupe key.';
