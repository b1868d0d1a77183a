-- Enqueue a message that may be invalid or has a key. It returns the result of _enqueue_receipt, its only caller beside
-- _enqueue_keyed, and runs with the owner's privileges.
CREATE FUNCTION pgoutbox._enqueue_checked(
    p_topic text,
    p_payload jsonb,
    p_queue text,
    p_destination text,
    p_coalesce_key text,
    p_dedupe_key text,
    p_available_at timestamptz,
    p_expires_at timestamptz,
    p_headers jsonb,
    p_max_attempts integer,
    p_ordering_key text,
    p_on_failed text,
    p_max_delay interval,
    p_coalesce_rule text,
    p_notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    -- The transaction has its id before its messages have theirs: CLAIM_NEW of the worker relies on it.
    own_xid constant xid8 := pg_catalog.pg_current_xact_id();
    -- True or null: a message of this rule has no head, and its enqueue takes no lock.
    coalesces_pending constant boolean := nullif(p_coalesce_rule = 'pending', false);
    new_id bigint;
    since timestamptz;
    problem text;
    digests bytea[];
    known_id bigint;
    known_digest bytea;
BEGIN
    problem := pgoutbox._argument_error(
        p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key,
        p_available_at, p_expires_at, p_headers, p_max_attempts, p_ordering_key, p_on_failed, p_max_delay,
        p_coalesce_rule
    );
    IF problem IS NOT NULL THEN
        PERFORM pgoutbox._raise_argument_error(problem);
    END IF;
    new_id := nextval('pgoutbox.message_id_seq');

    IF p_dedupe_key IS NOT NULL THEN
        digests := pgoutbox._payload_digests(p_payload);
        LOOP
            -- This waits for a transaction that is inserting the same key, and inserts the row if that one rolls back.
            INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest)
            VALUES (new_id, p_topic, p_dedupe_key, digests[1])
            ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING;
            EXIT WHEN FOUND;
            SELECT d.message_id, d.payload_digest
            INTO known_id, known_digest
            FROM pgoutbox.dedupe AS d
            WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
            CONTINUE WHEN NOT FOUND;
            IF pgoutbox._has_freed_key(known_id) THEN
                -- Concurrent callers get this lock one after the other, and the first one changes message_id. A redrive
                -- of the cancelled message holds it until its commit, so look at the message again.
                PERFORM FROM pgoutbox.dedupe AS d
                WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key AND d.message_id = known_id
                FOR UPDATE;
                CONTINUE WHEN NOT FOUND;
                CONTINUE WHEN NOT pgoutbox._has_freed_key(known_id);
                UPDATE pgoutbox.dedupe AS d
                SET message_id = new_id, payload_digest = digests[1], created_at = now()
                WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
                EXIT;
            ELSIF known_digest = ANY (digests) THEN
                RETURN -known_id;
            ELSE
                RAISE EXCEPTION USING
                    ERRCODE = 'unique_violation',
                    SCHEMA = 'pgoutbox',
                    TABLE = 'dedupe',
                    CONSTRAINT = 'dedupe_payload',
                    COLUMN = 'dedupe_key',
                    MESSAGE = 'pgoutbox.enqueue: dedupe_key: message ' || known_id || ' of topic ' || p_topic
                        || ' has this key and another payload';
            END IF;
        END LOOP;
    END IF;

    IF p_ordering_key IS NOT NULL THEN
        -- As below: the order of ids is the order of commits.
        INSERT INTO pgoutbox.ordering AS tail (last_id, queue, ordering_key)
        VALUES (new_id, p_queue, p_ordering_key)
        ON CONFLICT ON CONSTRAINT ordering_pkey DO UPDATE SET last_id = pgoutbox._next_id(tail.last_id)
        RETURNING tail.last_id INTO new_id;
    END IF;

    IF p_max_delay IS NOT NULL THEN
        -- Each newer message restarts the delay, up to max_delay after the first waiting one. The row is inserted
        -- first, so that of two concurrent first messages of a key the second one has a row to wait for.
        INSERT INTO pgoutbox.coalesce_head (newest_id, topic, coalesce_key)
        VALUES (new_id, p_topic, p_coalesce_key)
        ON CONFLICT ON CONSTRAINT coalesce_head_pkey DO NOTHING;
        SELECT head.newest_id, head.waiting_since
        INTO known_id, since
        FROM pgoutbox.coalesce_head AS head
        WHERE head.topic = p_topic AND head.coalesce_key = p_coalesce_key
        FOR UPDATE;
        IF NOT EXISTS (
            SELECT
            FROM pgoutbox.message AS m
            WHERE m.id = known_id AND m.state = 'pending' AND m.attempt_count = 0
        ) THEN
            since := NULL;
        END IF;
        since := coalesce(since, now());
        p_available_at := least(coalesce(p_available_at, now()), since + p_max_delay);
    END IF;

    IF p_coalesce_key IS NOT NULL AND coalesces_pending IS NULL THEN
        -- The id is drawn while the head row is locked, so among the messages of one key the order of ids is the order
        -- of commits. A message is superseded if the head names a greater id.
        INSERT INTO pgoutbox.coalesce_head AS head (newest_id, waiting_since, topic, coalesce_key)
        VALUES (new_id, since, p_topic, p_coalesce_key)
        ON CONFLICT ON CONSTRAINT coalesce_head_pkey DO UPDATE
        SET newest_id = pgoutbox._next_id(head.newest_id),
            waiting_since = coalesce(excluded.waiting_since, head.waiting_since)
        RETURNING head.newest_id INTO new_id;
    END IF;

    IF p_dedupe_key IS NOT NULL AND num_nonnulls(p_coalesce_key, p_ordering_key) > 0 THEN
        UPDATE pgoutbox.dedupe AS d
        SET message_id = new_id
        WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
    END IF;

    RETURN pgoutbox._write_message(
        new_id, p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key,
        p_available_at, p_expires_at, p_headers, p_max_attempts, p_ordering_key, nullif(p_on_failed, 'continue'),
        coalesces_pending, p_notify
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue_checked IS
    '_enqueue_receipt for messages with keys, options or invalid arguments.';
