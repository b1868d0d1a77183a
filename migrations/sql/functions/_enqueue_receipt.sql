-- Write one message in this transaction. The options are a draft without topic and payload. Returns the id, negative if
-- the message already existed. Its callers need no privilege on any table: it runs with the owner's privileges. It keeps
-- the promises of _enqueue without arrays, which cost as much again as the message. Statements that look rows up are in
-- functions that pin `enable_seqscan`, because the pin costs time even if it is not needed.
CREATE FUNCTION pgoutbox._enqueue_receipt(topic text, payload jsonb, options pgoutbox.draft, notify boolean)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_variable
DECLARE
    problem text;
    new_id bigint;
    floor_id bigint;
    known_id bigint;
    newest_id bigint;
    older_id bigint;
    due_at timestamptz;
BEGIN
    IF options IS NULL
        AND topic ~ '^[a-z][a-z0-9_.-]*$'
        AND length(topic) <= 63
        AND pg_column_size(payload) <= 65536
    THEN
        -- The id is drawn after the snapshot of the statement, so maintenance cannot have raised the floor above it meanwhile.
        INSERT INTO pgoutbox.message_live AS m (id, topic, payload)
        SELECT CASE WHEN n <= (SELECT f.newest_id FROM pgoutbox.id_floor AS f) THEN pgoutbox._refuse_id(n) ELSE n END,
            _enqueue_receipt.topic, _enqueue_receipt.payload
        FROM (SELECT nextval('pgoutbox.message_id_seq') OFFSET 0) AS drawn(n)
        RETURNING m.id INTO new_id;
        IF notify IS NOT FALSE THEN
            PERFORM pgoutbox._notify_workers('default');
        END IF;
        RETURN new_id;
    END IF;

    options.topic := topic;
    options.payload := payload;
    IF options.max_delay IS NOT NULL THEN
        RETURN (pgoutbox._enqueue(ARRAY[options], notify))[1];
    END IF;
    -- Most other messages have no more than keys. The full check would cost a tenth of their enqueue.
    IF (
        topic ~ '^[a-z][a-z0-9_.-]*$'
        AND length(topic) <= 63
        AND pg_column_size(payload) <= 65536
        AND octet_length(coalesce(options.coalesce_key, options.ordering_key, 'none')) BETWEEN 1 AND 512
        AND octet_length(coalesce(options.dedupe_key, 'none')) BETWEEN 1 AND 512
        AND num_nonnulls(options.coalesce_key, options.ordering_key) < 2
        AND num_nonnulls(
            options.queue, options.destination, options.owner, options.fair_key, options.on_duplicate, options.halts_key,
            options.available_at, options.delay, options.expires_at, options.expires_after, options.max_attempts,
            options.headers
        ) = 0
        AND (options.payload_version BETWEEN 1 AND 100) IS NOT FALSE
    ) IS NOT TRUE THEN
        problem := pgoutbox._draft_error(options);
        IF problem IS NOT NULL THEN
            PERFORM pgoutbox._raise_argument_error(problem);
        END IF;
    END IF;

    -- The id is drawn after the snapshot here too.
    SELECT nextval('pgoutbox.message_id_seq'), (SELECT f.newest_id FROM pgoutbox.id_floor AS f) INTO new_id, floor_id;
    IF new_id <= floor_id THEN
        PERFORM pgoutbox._refuse_id(new_id);
    END IF;
    IF options.dedupe_key IS NOT NULL THEN
        INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest, payload_version)
        VALUES (
            new_id, topic, options.dedupe_key, (pgoutbox._payload_digests(payload))[1],
            coalesce(options.payload_version, 1)
        )
        ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING;
        IF NOT FOUND THEN
            known_id := pgoutbox._take_used_dedupe_key(options, new_id);
            IF known_id IS NOT NULL THEN
                RETURN -known_id;
            END IF;
        END IF;
    END IF;
    IF options.coalesce_key IS NOT NULL OR options.ordering_key IS NOT NULL THEN
        -- If a transaction that drew later has committed meanwhile, another id is drawn under the lock.
        INSERT INTO pgoutbox.key_head AS head (newest_id, scope, key)
        VALUES (
            new_id,
            pgoutbox._scope_of(topic, options.queue, options.ordering_key),
            coalesce(options.coalesce_key, options.ordering_key)
        )
        ON CONFLICT ON CONSTRAINT key_head_pkey DO UPDATE
        SET newest_id = CASE
                WHEN excluded.newest_id > head.newest_id THEN excluded.newest_id
                ELSE pgoutbox._next_id(head.newest_id)
            END,
            replaced_id = head.newest_id
        RETURNING head.newest_id, head.replaced_id INTO newest_id, older_id;
        IF newest_id <> new_id AND options.dedupe_key IS NOT NULL THEN
            -- The row of the dedupe key belongs to this transaction.
            INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest)
            VALUES (newest_id, topic, options.dedupe_key, '')
            ON CONFLICT ON CONSTRAINT dedupe_pkey DO UPDATE
            SET message_id = excluded.message_id;
        END IF;
        new_id := newest_id;
    END IF;
    due_at := greatest(now(), options.available_at, now() + options.delay);

    INSERT INTO pgoutbox.message_live (
        id, topic, payload, queue, destination, owner, coalesce_key, ordering_key, dedupe_key, halts_key,
        available_at, expires_at, max_attempts, attempt_budget, headers, payload_version, fair_key, lane
    )
    VALUES (
        new_id, topic, payload, coalesce(options.queue, 'default'), options.destination, options.owner,
        options.coalesce_key, options.ordering_key, options.dedupe_key, coalesce(options.halts_key, false),
        due_at, coalesce(options.expires_at, due_at + options.expires_after), coalesce(options.max_attempts, 11),
        coalesce(options.max_attempts, 11), options.headers, coalesce(options.payload_version, 1),
        options.fair_key, CASE WHEN options.fair_key IS NULL THEN 0 ELSE 2 END
    );
    IF older_id IS NOT NULL AND options.coalesce_key IS NOT NULL THEN
        PERFORM pgoutbox._skip_superseded(ARRAY[older_id]);
    END IF;
    IF notify IS NOT FALSE THEN
        PERFORM pgoutbox._notify_workers(coalesce(options.queue, 'default'));
    END IF;
    RETURN new_id;
END
$function$;
