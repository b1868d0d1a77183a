-- One content, and one message with its own state for each destination.
CREATE FUNCTION pgoutbox.enqueue_fanout(
    topic text,
    payload jsonb,
    destinations text[],
    content jsonb DEFAULT NULL,
    queue text DEFAULT 'default',
    available_at timestamptz DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    max_attempts integer DEFAULT 11,
    notify boolean DEFAULT true
)
RETURNS TABLE (item_index integer, id bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    -- The transaction has its id before its messages have theirs: CLAIM_NEW of the worker relies on it.
    own_xid constant xid8 := pg_catalog.pg_current_xact_id();
    shared_id bigint;
    bad record;
BEGIN
    IF destinations IS NULL OR array_position(destinations, NULL) IS NOT NULL THEN
        PERFORM pgoutbox._raise_argument_error('destinations: must not be null, nor hold a null');
    END IF;
    SELECT (i.ordinality - 1)::integer AS item_index, i.problem
    INTO bad
    FROM (
        SELECT d.ordinality, pgoutbox._argument_error(
            enqueue_fanout.topic, enqueue_fanout.payload, enqueue_fanout.queue, d.destination, NULL, NULL,
            enqueue_fanout.available_at, enqueue_fanout.expires_at, enqueue_fanout.headers,
            enqueue_fanout.max_attempts, NULL, NULL, NULL, NULL
        ) AS problem
        FROM unnest(destinations) WITH ORDINALITY AS d(destination, ordinality)
    ) AS i
    WHERE i.problem IS NOT NULL
    ORDER BY i.ordinality
    LIMIT 1;
    IF FOUND THEN
        PERFORM pgoutbox._raise_argument_error(bad.problem, bad.item_index);
    END IF;
    IF pg_column_size(content) > 65536 AND octet_length(content::text) > 16777216 THEN
        PERFORM pgoutbox._raise_argument_error('content: must not have more than 16777216 bytes');
    END IF;
    IF content IS NOT NULL AND cardinality(destinations) > 0 THEN
        INSERT INTO pgoutbox.content AS c (body) VALUES (content) RETURNING c.id INTO shared_id;
    END IF;
    RETURN QUERY
    WITH item AS MATERIALIZED (
        SELECT d.destination, d.ordinality, nextval('pgoutbox.message_id_seq') AS id
        FROM unnest(destinations) WITH ORDINALITY AS d(destination, ordinality)
    ), large AS (
        INSERT INTO pgoutbox.large_payload (message_id, body)
        SELECT i.id, enqueue_fanout.payload
        FROM item AS i
        WHERE pgoutbox._is_large(enqueue_fanout.payload)
    ), inserted AS (
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, destination, content_id, available_at, expires_at, headers,
            max_attempts, attempt_budget
        )
        SELECT
            i.id, enqueue_fanout.topic,
            CASE WHEN NOT pgoutbox._is_large(enqueue_fanout.payload) THEN enqueue_fanout.payload END,
            enqueue_fanout.queue, i.destination, shared_id,
            greatest(enqueue_fanout.available_at, now()), enqueue_fanout.expires_at, enqueue_fanout.headers,
            enqueue_fanout.max_attempts, enqueue_fanout.max_attempts
        FROM item AS i
    )
    SELECT (i.ordinality - 1)::integer, i.id
    FROM item AS i;
    IF notify IS NOT FALSE AND cardinality(destinations) > 0 THEN
        PERFORM pgoutbox._notify_workers(enqueue_fanout.queue);
    END IF;
END
$function$;

COMMENT ON FUNCTION pgoutbox.enqueue_fanout IS
    'Enqueue one message for each destination in this transaction, and the shared content once.';
