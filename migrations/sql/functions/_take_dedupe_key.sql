-- Give a dedupe key to a new message. Returns the message that has the key, null if the new one got it. Raises 23505 if
-- that message has another payload, unless on_duplicate is ignore. The row of the key exists, unless it was deleted
-- after the caller looked.
CREATE FUNCTION pgoutbox._take_dedupe_key(
    p_topic text, p_dedupe_key text, p_payload jsonb, p_id bigint, p_on_duplicate text
)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
DECLARE
    digests constant bytea[] := pgoutbox._payload_digests(p_payload);
    known_id bigint;
    known_digest bytea;
BEGIN
    LOOP
        SELECT d.message_id, d.payload_digest
        INTO known_id, known_digest
        FROM pgoutbox.dedupe AS d
        WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key
        ORDER BY d.message_id DESC -- An old snapshot may see a deleted row too.
        LIMIT 1;
        IF NOT FOUND THEN
            INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest)
            VALUES (p_id, p_topic, p_dedupe_key, digests[1])
            ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING;
            CONTINUE WHEN NOT FOUND;
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
