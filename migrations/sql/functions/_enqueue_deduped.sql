-- Items whose only key is a dedupe key that no message has yet. _enqueue_checked handles the others.
CREATE FUNCTION pgoutbox._enqueue_deduped(
    topics text[],
    payloads jsonb[],
    queues text[],
    destinations text[],
    dedupe_keys text[],
    available_ats timestamptz[],
    delays double precision[],
    expires_ats timestamptz[],
    headers jsonb[],
    max_attempts integer[],
    owners text[]
)
RETURNS TABLE (item_index integer, id bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_nestloop = off
AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH item AS MATERIALIZED (
        SELECT s.*, nextval('pgoutbox.message_id_seq') AS id
        FROM (
            SELECT a.*
            FROM pgoutbox._bulk_items(
                topics, payloads, queues, destinations, NULL, dedupe_keys, available_ats, delays, expires_ats, headers,
                max_attempts, NULL, NULL, NULL, owners, NULL
            ) AS a
            WHERE a.dedupe_key IS NOT NULL
            ORDER BY a.topic COLLATE "C", a.dedupe_key COLLATE "C", a.item_index
        ) AS s
    ), taken AS (
        INSERT INTO pgoutbox.dedupe AS d (message_id, topic, dedupe_key, payload_digest)
        SELECT i.id, i.topic, i.dedupe_key, (pgoutbox._payload_digests(i.payload))[1]
        FROM item AS i
        ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING
        RETURNING d.message_id
    ), inserted AS (
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, destination, owner, dedupe_key, available_at, expires_at, headers,
            max_attempts, attempt_budget
        )
        SELECT
            i.id, i.topic, i.payload, i.queue, i.destination,
            i.owner, i.dedupe_key, greatest(i.available_at, now()),
            i.expires_at, i.headers, i.max_attempts, i.max_attempts
        FROM item AS i
        JOIN taken AS t ON t.message_id = i.id
    )
    SELECT i.item_index, i.id
    FROM item AS i
    JOIN taken AS t ON t.message_id = i.id;
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue_deduped IS
    'Enqueue the items of enqueue_many that have only a dedupe key, if no message has the key yet.';
