-- The row of the key exists, unless it was deleted after the caller looked. A later draft of the same key in one call does
-- not take over a key: the first one has decided.
CREATE FUNCTION pgoutbox._take_dedupe_key(
    p_topic text, p_dedupe_key text, p_payload jsonb, p_id bigint, p_on_duplicate text, p_is_first boolean
)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
DECLARE
    digests constant bytea[] := pgoutbox._payload_digests(p_payload);
    known_id bigint;
    known_digest bytea;
    known_kept boolean;
BEGIN
    LOOP
        SELECT d.message_id, d.payload_digest, d.is_kept
        INTO known_id, known_digest, known_kept
        FROM pgoutbox.dedupe AS d
        WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
        IF NOT FOUND THEN
            INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest)
            VALUES (p_id, p_topic, p_dedupe_key, digests[1])
            ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING;
            CONTINUE WHEN NOT FOUND;
            RETURN NULL;
        ELSIF p_is_first AND NOT known_kept AND pgoutbox._has_freed_key(known_id) THEN
            -- Concurrent callers get this lock one after the other, and the first one changes message_id. A redrive of
            -- the cancelled message holds it until its commit, so look at the message again.
            PERFORM FROM pgoutbox.dedupe AS d
            WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key AND d.message_id = known_id AND NOT d.is_kept
            FOR UPDATE;
            CONTINUE WHEN NOT FOUND;
            CONTINUE WHEN NOT pgoutbox._has_freed_key(known_id);
            UPDATE pgoutbox.dedupe AS d
            SET message_id = p_id, payload_digest = digests[1], created_at = now()
            WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
            RETURN NULL;
        ELSIF known_digest = ANY (digests) OR p_on_duplicate = 'ignore' THEN
            RETURN known_id;
        END IF;
        RAISE EXCEPTION USING
            ERRCODE = 'unique_violation',
            SCHEMA = 'pgoutbox',
            TABLE = 'dedupe',
            CONSTRAINT = 'dedupe_payload',
            COLUMN = 'dedupe_key',
            MESSAGE = 'pgoutbox.enqueue: dedupe_key: message ' || known_id || ' of topic ' || p_topic
                || ' has this key and another payload';
    END LOOP;
END
$function$;

COMMENT ON FUNCTION pgoutbox._take_dedupe_key IS
    'Give a dedupe key to a new message. Returns the message that has the key, null if the new one got it. Raises '
    '23505 if that message has another payload, unless on_duplicate is ignore.';
