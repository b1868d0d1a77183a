-- Change payload, headers, destination, owner or queue of pending and failed messages, in one of the states, and make
-- failed ones pending again. The changes are a JSON object of these fields; those of payload and headers are merge
-- patches (RFC 7396). Each message is corrected, missing, wrong_state, changed, superseded, encrypted, ordered,
-- dedupe_key_taken or locked. The audit has no values: names of the fields, and digests of the old and the new
-- destination. A destination is refused during a blackout. payload_version is the version of the patch, and with a later
-- version than that of the message, the payload is no patch but the whole new payload. It must be given if workers know a
-- later version.
--
-- Its caller can read the messages at the destination that it sets. So it is a right of its own, which the owner can
-- revoke. Payload and headers can be corrected by a role that may read them.
--
-- Failed and cancelled messages are redriven first, so only pending messages are changed. One that has been tried gets
-- its initial number of attempts: a process that still knows an earlier attempt tells by their limit that it must not go
-- on with it, nor count its hand-over for the corrected message.
CREATE FUNCTION pgoutbox.correct(
    ids bigint[], changes jsonb, states text[] DEFAULT '{pending,failed}', attempt_counts integer[] DEFAULT NULL
)
RETURNS SETOF pgoutbox.act_result
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    problem constant text := pgoutbox._correction_error(NULL, changes);
    caller constant text := coalesce(nullif(current_setting('role'), 'none'), session_user);
    is_content constant boolean := changes ?| '{payload,headers}';
    chosen pgoutbox.act_result[];
    corrected bigint[];
    destinations jsonb;
BEGIN
    PERFORM pgoutbox._raise_argument_error(problem, in_function => 'correct');
    IF is_content AND NOT has_table_privilege(caller, 'pgoutbox.message', 'SELECT') THEN
        RAISE insufficient_privilege USING
            MESSAGE = 'pgoutbox.correct: payload and headers: only a role that may read them may change them',
            HINT = format('Ask the owner to run: GRANT SELECT ON pgoutbox.message TO %I', caller);
    END IF;
    IF changes ? 'destination' THEN
        PERFORM pgoutbox._require_plain_destination('correct', changes ->> 'destination');
    END IF;
    -- The locks are held until the change. Nobody else changes the payload, the content or the keys of these messages.
    chosen := ARRAY(
        SELECT ROW(
            c.id,
            coalesce(
                c.result,
                CASE
                    -- An encrypted payload is bound to its destination, except that of a fan-out. The message for a
                    -- hook contains the payload of the failed message.
                    WHEN (changes ? 'payload' OR (changes ? 'destination' AND m.content_id IS NULL)) AND (
                        m.payload #> CASE WHEN m.failure_of IS NULL THEN '{}' ELSE '{payload}' END::text[]
                    ) ? 'pgoutbox.encrypted' IS TRUE THEN 'encrypted'
                    -- The place of a message in its ordering key belongs to its queue.
                    WHEN changes ? 'queue' AND m.ordering_key IS NOT NULL AND changes ->> 'queue' <> m.queue
                        THEN 'ordered'
                END
            ),
            c.state,
            c.other_id
        )::pgoutbox.act_result
        FROM unnest(pgoutbox._choose(
            ids,
            ARRAY(SELECT s.state FROM unnest(states) AS s(state) WHERE s.state IN ('pending', 'failed', 'cancelled')),
            attempt_counts,
            only_newest => true
        )) AS c
        LEFT JOIN pgoutbox.message AS m ON m.id = c.id AND m.state = c.state
        ORDER BY c.id
    );
    chosen := ARRAY(
        SELECT ROW(
            c.id, coalesce(c.result, nullif(r.result, 'redriven')), c.state, coalesce(c.other_id, r.other_id)
        )::pgoutbox.act_result
        FROM unnest(chosen) AS c
        LEFT JOIN pgoutbox.redrive(ARRAY(
            SELECT f.id FROM unnest(chosen) AS f WHERE f.result IS NULL AND f.state <> 'pending'
        )) AS r ON r.id = c.id
        ORDER BY c.id
    );
    corrected := ARRAY(SELECT c.id FROM unnest(chosen) AS c WHERE c.result IS NULL);
    IF is_content THEN
        PERFORM pgoutbox._raise_argument_error(e.problem, in_function => 'correct')
        FROM pgoutbox.message_live AS m
        CROSS JOIN LATERAL (SELECT pgoutbox._correction_error(m, changes)) AS e(problem)
        WHERE m.id = ANY (corrected) AND e.problem IS NOT NULL;
    END IF;
    destinations := (
        SELECT jsonb_object_agg(m.id, m.destination) FROM pgoutbox.message_live AS m WHERE m.id = ANY (corrected)
    );
    WITH written AS (
        UPDATE pgoutbox.message_live AS m
        SET payload = pgoutbox._corrected_payload(m, changes),
            payload_version = coalesce((changes ->> 'payload_version')::smallint, m.payload_version),
            headers = CASE
                WHEN changes ? 'headers' THEN nullif(pgoutbox._after_patch(m.headers, changes -> 'headers'), 'null')
                ELSE m.headers
            END,
            destination = CASE WHEN changes ? 'destination' THEN changes ->> 'destination' ELSE m.destination END,
            owner = CASE WHEN changes ? 'owner' THEN changes ->> 'owner' ELSE m.owner END,
            queue = coalesce(changes ->> 'queue', m.queue),
            lane = CASE WHEN m.fair_key IS NULL THEN m.lane ELSE 2 END,
            -- What was wrong is right now, so that the next attempt need not wait. A time that nobody has tried stays.
            available_at = CASE
                WHEN m.attempt_count > 0 AND (is_content OR changes ? 'destination') THEN least(m.available_at, now())
                ELSE m.available_at
            END,
            max_attempts = CASE
                WHEN m.attempt_count > 0 THEN m.attempt_count + m.attempt_budget ELSE m.max_attempts
            END
        WHERE m.id = ANY (corrected) AND m.state = 'pending'
        RETURNING m.id
    )
    SELECT array_agg(w.id) INTO corrected FROM written AS w;
    -- A row for each old destination. The audit outlives the messages, so it has digests and no values.
    PERFORM pgoutbox._record_act(
        'correct',
        message_ids => array_agg(c.id ORDER BY c.id),
        details => jsonb_build_object('fields', (SELECT jsonb_agg(k.name) FROM jsonb_object_keys(changes) AS k(name)))
            || CASE WHEN changes ? 'queue' THEN jsonb_build_object('queue', changes -> 'queue') ELSE '{}' END
            || CASE WHEN changes ? 'destination' THEN jsonb_build_object(
                'old_destination_digest', pgoutbox.destination_digest(min(c.destination)),
                'new_destination_digest', pgoutbox.destination_digest(changes ->> 'destination')
            ) ELSE '{}' END
    )
    FROM (SELECT i.id, destinations ->> i.id::text AS destination FROM unnest(corrected) AS i(id)) AS c
    GROUP BY CASE WHEN changes ? 'destination' THEN c.destination END;
    RETURN QUERY SELECT * FROM pgoutbox._acted('correct', 'corrected', chosen, corrected, records => false);
END
$function$;
