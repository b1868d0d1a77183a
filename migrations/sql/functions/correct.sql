-- Its caller can read the messages at the destination that it sets. So it is a right of its own, which the owner can
-- revoke. Payload and headers can be corrected by a role that may read them.
--
-- Failed and cancelled messages are redriven first, so only pending messages are changed. An encrypted payload is bound
-- to its destination, except that of a fan-out; the message for a hook contains the payload of the failed message. The
-- place of a message in its ordering key belongs to its queue.
CREATE FUNCTION pgoutbox.correct(ids bigint[], changes jsonb, states text[] DEFAULT '{pending,failed}')
RETURNS TABLE (id bigint, result text, state text, superseded_by bigint, dedupe_key_of bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $function$
#variable_conflict use_column
DECLARE
    problem constant text := pgoutbox._correction_error(changes);
    caller constant text := coalesce(nullif(current_setting('role'), 'none'), session_user);
    chosen bigint[];
    done bigint[];
BEGIN
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = '22023', SCHEMA = 'pgoutbox', COLUMN = split_part(problem, ':', 1),
            MESSAGE = 'pgoutbox.correct: ' || problem;
    END IF;
    IF changes ?| '{payload,headers}' AND NOT has_table_privilege(caller, 'pgoutbox.message', 'SELECT') THEN
        RAISE insufficient_privilege USING
            MESSAGE = 'pgoutbox.correct: payload and headers: only a role that may read them may change them',
            HINT = format('Ask the owner to run: GRANT SELECT ON pgoutbox.message TO %I', caller);
    END IF;
    IF changes ? 'destination' THEN
        PERFORM pgoutbox._refuse_in_blackout('correct: destination');
    END IF;
    -- The locks are held until the change. Nobody else changes the payload, the content or the keys of these messages.
    chosen := ARRAY(
        SELECT m.id
        FROM pgoutbox.message AS m
        WHERE m.id = ANY (ids)
            AND m.state IN ('failed', 'cancelled')
            AND pgoutbox._correction_bar(m, changes) IS NULL
        ORDER BY m.id
        FOR UPDATE SKIP LOCKED
    );
    chosen := ARRAY(SELECT r.id FROM pgoutbox.redrive(chosen, correct.states) AS r WHERE r.redriven);
    IF 'pending' = ANY (correct.states) THEN
        chosen := chosen || ARRAY(SELECT p.id FROM unnest(ids) AS p(id) WHERE p.id <> ALL (chosen));
    END IF;
    chosen := pgoutbox._lock_pending(chosen);
    WITH corrected AS (
        UPDATE pgoutbox.message_live AS m
        SET payload = CASE WHEN changes ? 'payload' THEN changes -> 'payload' ELSE m.payload END,
            headers = CASE WHEN changes ? 'headers' THEN nullif(changes -> 'headers', 'null') ELSE m.headers END,
            destination = CASE WHEN changes ? 'destination' THEN changes ->> 'destination' ELSE m.destination END,
            owner = CASE WHEN changes ? 'owner' THEN changes ->> 'owner' ELSE m.owner END,
            queue = coalesce(changes ->> 'queue', m.queue),
            -- One that waits for its next attempt is tried at once. One that waits for its time is not.
            available_at = CASE WHEN m.attempt_count > 0 THEN least(m.available_at, now()) ELSE m.available_at END
        FROM pgoutbox.message_live AS before
        LEFT JOIN pgoutbox.key_head AS head ON head.scope = before.topic AND head.key = before.coalesce_key
        WHERE m.id = before.id
            AND before.id = ANY (chosen)
            AND m.state = 'pending'
            AND coalesce(head.newest_id <= before.id, true)
            AND pgoutbox._correction_bar(before, changes) IS NULL
        RETURNING m.id, m.queue, before.destination
    ), notified AS MATERIALIZED (
        SELECT pgoutbox._wake_all_workers(q.queue)
        FROM (SELECT DISTINCT c.queue FROM corrected AS c) AS q
    ), recorded AS MATERIALIZED (
        -- A row for each old destination. The audit outlives the messages, so it has digests and no values.
        SELECT pgoutbox._record_act(
            'correct',
            message_ids => array_agg(c.id ORDER BY c.id),
            details => jsonb_build_object('fields', (SELECT jsonb_agg(k.name) FROM jsonb_object_keys(changes) AS k(name)))
                || CASE WHEN changes ? 'queue' THEN jsonb_build_object('queue', changes -> 'queue') ELSE '{}' END
                || CASE WHEN changes ? 'destination' THEN jsonb_build_object(
                    'old_destination_digest', pgoutbox.destination_digest(min(c.destination)),
                    'new_destination_digest', pgoutbox.destination_digest(changes ->> 'destination')
                ) ELSE '{}' END
        )
        FROM corrected AS c
        GROUP BY CASE WHEN changes ? 'destination' THEN c.destination END
    )
    SELECT ARRAY(SELECT c.id FROM corrected AS c)
    INTO done
    WHERE (SELECT count(*) FROM notified) + (SELECT count(*) FROM recorded) >= 0;
    RETURN QUERY
    SELECT
        a.id,
        CASE
            WHEN a.id = ANY (done) THEN 'corrected'
            WHEN m.id IS NULL THEN 'missing'
            WHEN m.state <> ALL (correct.states) OR m.state NOT IN ('pending', 'failed', 'cancelled') THEN 'wrong_state'
            WHEN head.newest_id > a.id THEN 'superseded'
            ELSE coalesce(
                pgoutbox._correction_bar(m, changes),
                CASE WHEN d.message_id <> a.id THEN 'dedupe_key_taken' ELSE 'locked' END
            )
        END,
        m.state,
        CASE WHEN head.newest_id > a.id THEN head.newest_id END,
        CASE WHEN d.message_id <> a.id THEN d.message_id END
    FROM (SELECT DISTINCT i.id FROM unnest(ids) AS i(id)) AS a
    LEFT JOIN pgoutbox.message AS m ON m.id = a.id
    LEFT JOIN pgoutbox.key_head AS head ON head.scope = m.topic AND head.key = m.coalesce_key
    LEFT JOIN pgoutbox.dedupe AS d ON d.topic = m.topic AND d.dedupe_key = m.dedupe_key
    ORDER BY a.id;
END
$function$;

COMMENT ON FUNCTION pgoutbox.correct IS
    'Change payload, headers, destination, owner or queue of pending and failed messages, in one of the states, and make '
    'failed ones pending again. The changes are a JSON object of the fields to replace. Returns for each message '
    'corrected, or the reason why it was left alone: missing, wrong_state, superseded, encrypted, ordered (its ordering '
    'key belongs to its queue), dedupe_key_taken, or locked (try again). The audit has no values: names of the fields, '
    'and digests of the old and the new destination. A destination is refused during a blackout.';
