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
    p_owner text,
    p_on_duplicate text,
    p_notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    problem constant text := pgoutbox._argument_error(
        p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key,
        p_available_at, p_expires_at, p_headers, p_max_attempts, p_ordering_key, p_on_failed, p_max_delay,
        p_owner, p_on_duplicate
    );
    new_id bigint;
    known_id bigint;
    older_id bigint;
    since timestamptz;
BEGIN
    IF problem IS NOT NULL THEN
        PERFORM pgoutbox._raise_argument_error(problem);
    END IF;
    new_id := nextval('pgoutbox.message_id_seq');

    IF p_dedupe_key IS NOT NULL THEN
        known_id := pgoutbox._take_dedupe_key(p_topic, p_dedupe_key, p_payload, new_id, p_on_duplicate);
        IF known_id IS NOT NULL THEN
            RETURN -known_id;
        END IF;
    END IF;

    -- The message gets the id that is drawn while the row of its key is locked. So the ids of a key have the order of
    -- the commits, and a message is superseded if the head of its coalesce key names a greater id.
    IF p_ordering_key IS NOT NULL THEN
        INSERT INTO pgoutbox.ordering AS tail (last_id, queue, ordering_key)
        VALUES (new_id, p_queue, p_ordering_key)
        ON CONFLICT ON CONSTRAINT ordering_pkey DO UPDATE SET last_id = pgoutbox._next_id(tail.last_id)
        RETURNING tail.last_id INTO new_id;
    END IF;
    IF p_max_delay IS NOT NULL THEN
        since := pgoutbox._waiting_since(p_topic, p_coalesce_key, new_id);
        p_available_at := least(coalesce(p_available_at, now()), since + p_max_delay);
    END IF;
    IF p_coalesce_key IS NOT NULL THEN
        INSERT INTO pgoutbox.coalesce_head AS head (newest_id, waiting_since, topic, coalesce_key)
        VALUES (new_id, since, p_topic, p_coalesce_key)
        ON CONFLICT ON CONSTRAINT coalesce_head_pkey DO UPDATE
        SET newest_id = pgoutbox._next_id(head.newest_id),
            replaced_id = head.newest_id,
            waiting_since = coalesce(excluded.waiting_since, head.waiting_since)
        RETURNING head.newest_id, head.replaced_id INTO new_id, older_id;
        IF EXISTS (
            SELECT
            FROM pgoutbox.message_live AS m
            WHERE m.id = older_id AND m.state = 'pending' AND m.available_at > clock_timestamp()
        ) THEN
            PERFORM pgoutbox._skip_superseded(ARRAY[older_id], ARRAY[new_id]);
        END IF;
    END IF;
    IF p_dedupe_key IS NOT NULL AND num_nonnulls(p_coalesce_key, p_ordering_key) > 0 THEN
        UPDATE pgoutbox.dedupe AS d
        SET message_id = new_id
        WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
    END IF;

    INSERT INTO pgoutbox.message_live (
        id, topic, payload, queue, destination, coalesce_key, dedupe_key, ordering_key, owner, on_failed,
        available_at, expires_at, headers, max_attempts, attempt_budget
    ) VALUES (
        new_id, p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key, p_ordering_key, p_owner,
        nullif(p_on_failed, 'continue'), greatest(p_available_at, now()), p_expires_at, p_headers, p_max_attempts,
        p_max_attempts
    );
    IF p_notify IS NOT FALSE THEN
        PERFORM pgoutbox._notify_workers(p_queue);
    END IF;
    RETURN new_id;
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue_checked IS
    '_enqueue_receipt for messages with keys, options or invalid arguments.';
