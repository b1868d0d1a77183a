-- One content, and one message with its own state for each destination. An element of payloads, headers_each,
-- available_ats, delays or owners belongs to one destination; without it the message has the common value.
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
    notify boolean DEFAULT true,
    owner text DEFAULT NULL,
    payloads jsonb[] DEFAULT NULL,
    headers_each jsonb[] DEFAULT NULL,
    available_ats timestamptz[] DEFAULT NULL,
    delays double precision[] DEFAULT NULL,
    owners text[] DEFAULT NULL
)
RETURNS TABLE (item_index integer, id bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    shared_id bigint;
    bad record;
BEGIN
    IF current_setting('array_nulls') = 'off' THEN
        -- The elements without a value have arrived as the text NULL.
        PERFORM pgoutbox._raise_argument_error('array_nulls: must be on in a session that enqueues arrays');
    END IF;
    IF destinations IS NULL OR array_position(destinations, NULL) IS NOT NULL THEN
        PERFORM pgoutbox._raise_argument_error('destinations: must not be null, nor hold a null');
    END IF;
    IF greatest(
        cardinality(payloads), cardinality(headers_each), cardinality(available_ats), cardinality(delays),
        cardinality(owners)
    ) > cardinality(destinations) THEN
        PERFORM pgoutbox._raise_argument_error('destinations: no other array may have more elements');
    END IF;
    SELECT i.item_index, i.problem
    INTO bad
    FROM (
        SELECT f.item_index, pgoutbox._argument_error(
            enqueue_fanout.topic, f.payload, enqueue_fanout.queue, f.destination, NULL, NULL, f.available_at,
            enqueue_fanout.expires_at, f.headers, enqueue_fanout.max_attempts, NULL, NULL, NULL, f.owner, NULL
        ) AS problem
        FROM pgoutbox._fanout_items(
            destinations, enqueue_fanout.payload, enqueue_fanout.available_at, enqueue_fanout.headers,
            enqueue_fanout.owner, payloads, headers_each, available_ats, delays, owners
        ) AS f
    ) AS i
    WHERE i.problem IS NOT NULL
    ORDER BY i.item_index
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
        SELECT f.*, nextval('pgoutbox.message_id_seq') AS id
        FROM pgoutbox._fanout_items(
            destinations, enqueue_fanout.payload, enqueue_fanout.available_at, enqueue_fanout.headers,
            enqueue_fanout.owner, payloads, headers_each, available_ats, delays, owners
        ) AS f
    ), inserted AS (
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, destination, owner, content_id, available_at, expires_at, headers,
            max_attempts, attempt_budget
        )
        SELECT
            i.id, enqueue_fanout.topic, i.payload, enqueue_fanout.queue, i.destination, i.owner, shared_id, greatest(i.available_at, now()),
            enqueue_fanout.expires_at, i.headers, enqueue_fanout.max_attempts, enqueue_fanout.max_attempts
        FROM item AS i
    )
    SELECT i.item_index, i.id
    FROM item AS i;
    IF notify IS NOT FALSE AND cardinality(destinations) > 0 THEN
        PERFORM pgoutbox._notify_workers(enqueue_fanout.queue);
    END IF;
END
$function$;

COMMENT ON FUNCTION pgoutbox.enqueue_fanout IS
    'Enqueue one message for each destination in this transaction, and the shared content once. The arrays hold values '
    'of single destinations; a null element means the common value.';
