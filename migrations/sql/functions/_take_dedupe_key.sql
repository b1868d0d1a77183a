-- Give the dedupe key of a draft to its message. Returns the message that has the key, null if this one got it. Raises
-- 23505 if that message has another payload of the same version, unless on_duplicate is ignore: a deployment that changes
-- the payload must not fail the transactions that repeat a message of the former release. The row of the key exists,
-- unless it was deleted after the caller looked.
CREATE FUNCTION pgoutbox._take_dedupe_key(draft pgoutbox.draft, message_id bigint)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
DECLARE
    version constant smallint := coalesce(draft.payload_version, 1);
    digests constant bytea[] := pgoutbox._payload_digests(draft.payload);
    known_id bigint;
    known_digest bytea;
    known_version smallint;
BEGIN
    LOOP
        SELECT d.message_id, d.payload_digest, d.payload_version
        INTO known_id, known_digest, known_version
        FROM pgoutbox.dedupe AS d
        WHERE d.topic = draft.topic AND d.dedupe_key = draft.dedupe_key
        ORDER BY d.message_id DESC -- An old snapshot may see a deleted row too.
        LIMIT 1;
        IF NOT FOUND THEN
            INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest, payload_version)
            VALUES (_take_dedupe_key.message_id, draft.topic, draft.dedupe_key, digests[1], version)
            ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING;
            CONTINUE WHEN NOT FOUND;
            RETURN NULL;
        ELSIF known_digest = ANY (digests) OR known_version <> version OR draft.on_duplicate = 'ignore' THEN
            RETURN known_id;
        END IF;
        RAISE EXCEPTION USING
            ERRCODE = 'unique_violation',
            SCHEMA = 'pgoutbox',
            TABLE = 'dedupe',
            CONSTRAINT = 'dedupe_payload',
            COLUMN = 'dedupe_key',
            MESSAGE = 'pgoutbox.enqueue: dedupe_key: message ' || known_id || ' of topic ' || draft.topic
                || ' has this key and another payload';
    END LOOP;
END
$function$;
