-- Give the dedupe keys of the chosen messages back to them. A key whose message is deleted is free. One that an enqueue
-- has taken meanwhile has another message, and stays: then the message is not chosen. Returns the choice.
CREATE FUNCTION pgoutbox._take_back_keys(chosen pgoutbox.act_result[])
RETURNS pgoutbox.act_result[]
LANGUAGE plpgsql
AS $function$
DECLARE
    keyed constant bigint[] := ARRAY(
        SELECT m.id
        FROM unnest(chosen) AS c
        JOIN pgoutbox.message AS m ON m.id = c.id AND m.state = c.state
        WHERE c.result IS NULL AND m.dedupe_key IS NOT NULL
    );
    owned bigint[];
BEGIN
    IF cardinality(keyed) = 0 THEN
        RETURN chosen;
    END IF;
    WITH free AS MATERIALIZED (
        SELECT d.topic, d.dedupe_key, d.message_id
        FROM pgoutbox.message AS m
        JOIN pgoutbox.dedupe AS d ON d.topic = m.topic AND d.dedupe_key = m.dedupe_key
        WHERE m.id = ANY (keyed)
            AND NOT d.is_kept
            AND (SELECT o.id FROM pgoutbox.message AS o WHERE o.id = d.message_id LIMIT 1) IS NULL
        FOR UPDATE OF d SKIP LOCKED
    )
    DELETE FROM pgoutbox.dedupe AS d
    USING free AS f
    WHERE d.topic = f.topic AND d.dedupe_key = f.dedupe_key AND d.message_id = f.message_id;
    -- enqueue gives the dedupe key of a cancelled message to the next one while it holds this lock.
    owned := ARRAY(
        SELECT m.id
        FROM pgoutbox.message AS m
        JOIN pgoutbox.dedupe AS d ON d.topic = m.topic AND d.dedupe_key = m.dedupe_key
        WHERE m.id = ANY (keyed) AND d.message_id = m.id
        FOR UPDATE OF d SKIP LOCKED
    );
    WITH rekeyed AS (
        -- The message that took over the key may be deleted, and its key too.
        INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest, payload_version)
        SELECT m.id, m.topic, m.dedupe_key, (pgoutbox._payload_digests(m.payload))[1], m.payload_version
        FROM pgoutbox.message AS m
        WHERE m.id = ANY (keyed)
            AND NOT EXISTS (
                SELECT FROM pgoutbox.dedupe AS d WHERE d.topic = m.topic AND d.dedupe_key = m.dedupe_key
            )
        ORDER BY m.id DESC
        ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING
        RETURNING message_id
    )
    SELECT owned || coalesce(array_agg(r.message_id), '{}') INTO owned FROM rekeyed AS r;
    RETURN ARRAY(
        SELECT CASE
            WHEN c.id = ANY (keyed) AND c.id <> ALL (owned) THEN ROW(
                c.id,
                CASE WHEN d.message_id <> c.id THEN 'dedupe_key_taken' ELSE 'locked' END,
                c.state,
                nullif(d.message_id, c.id)
            )::pgoutbox.act_result
            ELSE ROW(c.*)::pgoutbox.act_result
        END
        FROM unnest(chosen) AS c
        LEFT JOIN pgoutbox.message AS m ON m.id = c.id AND m.state = c.state AND c.result IS NULL
        LEFT JOIN pgoutbox.dedupe AS d ON d.topic = m.topic AND d.dedupe_key = m.dedupe_key
        ORDER BY c.id
    );
END
$function$;
