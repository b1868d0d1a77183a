-- The result has for each id the state before, the newer message if it was superseded, and the message that has its
-- dedupe key if another one has it. A message can change between the query of a filter and this call: an operator
-- cancelled a failed message, or it was tried again and failed with another error, perhaps with an unknown outcome. The
-- caller did not ask for these messages.
CREATE FUNCTION pgoutbox.redrive(
    ids bigint[],
    states text[] DEFAULT '{failed,cancelled}',
    attempt_counts integer[] DEFAULT NULL,
    destination text DEFAULT NULL
)
RETURNS TABLE (
    id bigint, redriven boolean, state text, superseded_by bigint, attempt_count integer, dedupe_key_of bigint
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    problem constant text := pgoutbox._argument_error(
        'a', '1', 'a', redrive.destination, NULL, NULL, NULL, NULL, NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL
    );
BEGIN
    IF problem IS NOT NULL THEN
        PERFORM pgoutbox._raise_argument_error(problem);
    END IF;
    RETURN QUERY
    WITH asked AS (
        SELECT DISTINCT ON (a.id) a.id, a.attempt_count
        FROM unnest(ids, attempt_counts) AS a(id, attempt_count)
        ORDER BY a.id
    ), locked AS MATERIALIZED (
        SELECT m.id, m.state, m.topic, m.dedupe_key, head.newest_id
        FROM asked AS a
        JOIN pgoutbox.message AS m ON m.id = a.id
        LEFT JOIN pgoutbox.coalesce_head AS head
            ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND m.coalesces_pending IS NOT TRUE
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
        SELECT l.id, l.topic, l.dedupe_key, (pgoutbox._payload_digests(pgoutbox.payload_of(m)))[1]
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
            destination = coalesce(redrive.destination, m.destination),
            available_at = now(),
            finished_at = NULL,
            cancel_requested_at = NULL,
            max_attempts = m.attempt_count + m.attempt_budget
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
    ), notified AS MATERIALIZED (
        SELECT pgoutbox._wake_all_workers(q.queue)
        FROM (SELECT DISTINCT r.queue FROM redriven AS r) AS q
    ), recorded AS MATERIALIZED (
        -- The address is not recorded: the audit outlives the message.
        SELECT pgoutbox._record_act(
            'redrive',
            message_ids => array_agg(r.id ORDER BY r.id),
            details => CASE WHEN redrive.destination IS NOT NULL THEN '{"destination": "corrected"}'::jsonb END
        )
        FROM redriven AS r
        HAVING count(*) > 0
    )
    SELECT
        a.id,
        r.id IS NOT NULL AND (SELECT count(*) FROM notified) >= 0 AND (SELECT count(*) FROM recorded) >= 0,
        m.state,
        CASE WHEN head.newest_id > a.id THEN head.newest_id END,
        m.attempt_count,
        CASE WHEN d.message_id <> a.id THEN d.message_id END
    FROM asked AS a
    LEFT JOIN pgoutbox.message AS m ON m.id = a.id
    LEFT JOIN pgoutbox.coalesce_head AS head
        ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND m.coalesces_pending IS NOT TRUE
    LEFT JOIN pgoutbox.dedupe AS d ON d.topic = m.topic AND d.dedupe_key = m.dedupe_key
    LEFT JOIN redriven AS r ON r.id = a.id
    ORDER BY a.id;
END
$function$;

COMMENT ON FUNCTION pgoutbox.redrive IS
    'Make failed and cancelled messages pending again, if they are in one of the states and, if given, at these '
    'attempts. A destination replaces theirs. Returns for each message whether it was redriven, its state before, the newer message if it is '
    'superseded, and its attempt count.';
