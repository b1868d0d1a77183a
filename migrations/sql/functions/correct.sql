-- Its caller can read the messages at the destination that it sets. So it is a right of its own, which the owner can
-- revoke. Payload and headers can be corrected by a role that may read them.
--
-- Failed and cancelled messages are redriven first, so only pending messages are changed. One that has been tried gets
-- its initial number of attempts: a process that still knows an earlier attempt tells by their limit that it must not go
-- on with it, nor count its hand-over for the corrected message.
CREATE FUNCTION pgoutbox.correct(
    ids bigint[], changes jsonb, states text[] DEFAULT '{pending,failed}', attempt_counts integer[] DEFAULT NULL
)
RETURNS TABLE (
    id bigint, result text, state text, superseded_by bigint, attempt_count integer, dedupe_key_of bigint
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    problem constant text := pgoutbox._correction_error(NULL, changes);
    caller constant text := coalesce(nullif(current_setting('role'), 'none'), session_user);
    is_content constant boolean := changes ?| '{payload,headers}';
    finished bigint[];
    chosen bigint[];
    done bigint[];
BEGIN
    IF problem IS NOT NULL THEN
        PERFORM pgoutbox._raise_argument_error(problem, in_function => 'correct');
    END IF;
    IF is_content AND NOT has_table_privilege(caller, 'pgoutbox.message', 'SELECT') THEN
        RAISE insufficient_privilege USING
            MESSAGE = 'pgoutbox.correct: payload and headers: only a role that may read them may change them',
            HINT = format('Ask the owner to run: GRANT SELECT ON pgoutbox.message TO %I', caller);
    END IF;
    IF changes ? 'destination' THEN
        PERFORM pgoutbox._require_plain_destination('correct', changes ->> 'destination');
    END IF;
    -- The locks are held until the change. Nobody else changes the payload, the content or the keys of these messages.
    finished := ARRAY(
        SELECT m.id
        FROM (SELECT DISTINCT ON (a.id) a.id, a.count FROM unnest(ids, attempt_counts) AS a(id, count) ORDER BY a.id) AS a
        JOIN pgoutbox.message AS m ON m.id = a.id
        WHERE m.state IN ('failed', 'cancelled')
            AND m.attempt_count = coalesce(a.count, m.attempt_count)
            AND pgoutbox._correction_bar(m, changes) IS NULL
        ORDER BY m.id
        FOR UPDATE OF m SKIP LOCKED
    );
    finished := ARRAY(SELECT r.id FROM pgoutbox.redrive(finished, correct.states) AS r WHERE r.result = 'redriven');
    IF 'pending' = ANY (correct.states) THEN
        chosen := pgoutbox._lock_pending(
            ARRAY(SELECT i.id FROM unnest(ids) AS i(id) EXCEPT SELECT f.id FROM unnest(finished) AS f(id))
        );
    END IF;
    IF is_content THEN
        PERFORM pgoutbox._raise_argument_error(e.problem, in_function => 'correct')
        FROM pgoutbox.message_live AS m
        CROSS JOIN LATERAL (SELECT pgoutbox._correction_error(m, changes)) AS e(problem)
        WHERE m.id = ANY (finished || chosen) AND e.problem IS NOT NULL;
    END IF;
    WITH corrected AS (
        UPDATE pgoutbox.message_live AS m
        SET payload = CASE
                WHEN changes ? 'payload' THEN pgoutbox._after_patch(m.payload, changes -> 'payload') ELSE m.payload
            END,
            headers = CASE
                WHEN changes ? 'headers' THEN nullif(pgoutbox._after_patch(m.headers, changes -> 'headers'), 'null')
                ELSE m.headers
            END,
            destination = CASE WHEN changes ? 'destination' THEN changes ->> 'destination' ELSE m.destination END,
            owner = CASE WHEN changes ? 'owner' THEN changes ->> 'owner' ELSE m.owner END,
            queue = coalesce(changes ->> 'queue', m.queue),
            -- What was wrong is right now, so that the next attempt need not wait. A time that nobody has tried stays.
            available_at = CASE
                WHEN m.attempt_count > 0 AND (is_content OR changes ? 'destination') THEN least(m.available_at, now())
                ELSE m.available_at
            END,
            max_attempts = CASE
                WHEN m.attempt_count > 0 THEN m.attempt_count + m.attempt_budget ELSE m.max_attempts
            END
        FROM (
            SELECT DISTINCT ON (a.id) a.id, a.count
            FROM unnest(ids, attempt_counts) AS a(id, count)
            ORDER BY a.id
        ) AS a
        JOIN pgoutbox.message_live AS before ON before.id = a.id
        LEFT JOIN pgoutbox.key_head AS head ON head.scope = before.topic AND head.key = before.coalesce_key
        WHERE m.id = before.id
            AND m.id = ANY (finished || chosen)
            AND m.state = 'pending'
            AND m.attempt_count = coalesce(a.count, m.attempt_count)
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
            WHEN d.id IS NOT NULL THEN 'corrected'
            WHEN m.id IS NULL THEN 'missing'
            WHEN m.state <> ALL (correct.states) OR m.state NOT IN ('pending', 'failed', 'cancelled') THEN 'wrong_state'
            WHEN m.attempt_count <> a.count THEN 'changed'
            WHEN head.newest_id > a.id THEN 'superseded'
            ELSE coalesce(
                pgoutbox._correction_bar(m, changes),
                CASE WHEN key.message_id <> a.id THEN 'dedupe_key_taken' ELSE 'locked' END
            )
        END,
        m.state,
        CASE WHEN head.newest_id > a.id THEN head.newest_id END,
        m.attempt_count,
        CASE WHEN key.message_id <> a.id THEN key.message_id END
    FROM (SELECT DISTINCT ON (a.id) a.id, a.count FROM unnest(ids, attempt_counts) AS a(id, count) ORDER BY a.id) AS a
    LEFT JOIN unnest(done) AS d(id) ON d.id = a.id
    LEFT JOIN pgoutbox.message AS m ON m.id = a.id
    LEFT JOIN pgoutbox.key_head AS head ON head.scope = m.topic AND head.key = m.coalesce_key
    LEFT JOIN pgoutbox.dedupe AS key ON key.topic = m.topic AND key.dedupe_key = m.dedupe_key
    ORDER BY a.id;
END
$function$;

COMMENT ON FUNCTION pgoutbox.correct IS
    'Change payload, headers, destination, owner or queue of pending and failed messages, in one of the states, and make '
    'failed ones pending again. The changes are a JSON object of these fields; those of payload and headers are merge '
    'patches (RFC 7396). Returns for each message corrected, or the reason why it was left alone: missing, wrong_state, '
    'changed (not at these attempts), superseded, encrypted, ordered (its ordering key belongs to its queue), '
    'dedupe_key_taken, or locked (try again). The audit has no values: names of the fields, and digests of the old and '
    'the new destination. A destination is refused during a blackout.';
