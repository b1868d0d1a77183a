CREATE FUNCTION pgoutbox.enqueue_many(
    topics text[],
    payloads jsonb[],
    queues text[] DEFAULT NULL,
    destinations text[] DEFAULT NULL,
    coalesce_keys text[] DEFAULT NULL,
    dedupe_keys text[] DEFAULT NULL,
    available_ats timestamptz[] DEFAULT NULL,
    delays double precision[] DEFAULT NULL,
    expires_ats timestamptz[] DEFAULT NULL,
    headers jsonb[] DEFAULT NULL,
    max_attempts integer[] DEFAULT NULL,
    notify boolean DEFAULT true,
    ordering_keys text[] DEFAULT NULL,
    on_failed text[] DEFAULT NULL,
    max_delays double precision[] DEFAULT NULL,
    owners text[] DEFAULT NULL,
    on_duplicates text[] DEFAULT NULL
)
RETURNS TABLE (item_index integer, id bigint, duplicate boolean)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    bad record;
BEGIN
    IF current_setting('array_nulls') = 'off' THEN
        -- The elements without a value have arrived as the text NULL.
        PERFORM pgoutbox._raise_argument_error('array_nulls: must be on in a session that enqueues arrays');
    END IF;
    IF topics IS NULL THEN
        PERFORM pgoutbox._raise_argument_error('topics: must not be null');
    END IF;
    IF cardinality(payloads) IS DISTINCT FROM cardinality(topics) THEN
        PERFORM pgoutbox._raise_argument_error('payloads: must have as many elements as topics');
    END IF;
    IF greatest(
        cardinality(queues), cardinality(destinations), cardinality(coalesce_keys), cardinality(dedupe_keys),
        cardinality(available_ats), cardinality(delays), cardinality(expires_ats), cardinality(headers),
        cardinality(max_attempts), cardinality(ordering_keys), cardinality(on_failed), cardinality(max_delays),
        cardinality(owners), cardinality(on_duplicates)
    ) > cardinality(topics) THEN
        PERFORM pgoutbox._raise_argument_error('topics: no other array may have more elements');
    END IF;

    SELECT i.item_index, i.problem
    INTO bad
    FROM (
        SELECT a.item_index, CASE
            WHEN pgoutbox._is_plain(
                a.topic, a.payload, a.queue, a.destination, a.coalesce_key, a.dedupe_key, a.available_at,
                a.expires_at, a.headers, a.max_attempts, a.ordering_key, a.on_failed, a.max_delay, a.owner,
                a.on_duplicate
            ) THEN NULL
            ELSE pgoutbox._argument_error(
                a.topic, a.payload, a.queue, a.destination, a.coalesce_key, a.dedupe_key, a.available_at,
                a.expires_at, a.headers, a.max_attempts, a.ordering_key, a.on_failed, a.max_delay, a.owner,
                a.on_duplicate
            )
        END AS problem
        FROM pgoutbox._bulk_items(
            topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
            headers, max_attempts, ordering_keys, on_failed, max_delays, owners, on_duplicates
        ) AS a
    ) AS i
    WHERE i.problem IS NOT NULL
    ORDER BY i.item_index
    LIMIT 1;
    IF FOUND THEN
        PERFORM pgoutbox._raise_argument_error(bad.problem, bad.item_index);
    END IF;

    IF num_nonnulls(coalesce_keys, dedupe_keys, ordering_keys) = 0 THEN
        -- The ids are drawn in the order of the items.
        RETURN QUERY
        WITH inserted AS (
            INSERT INTO pgoutbox.message_live AS m (
                topic, payload, queue, destination, owner, available_at, expires_at, headers, max_attempts,
                attempt_budget
            )
            SELECT
                a.topic, a.payload, a.queue, a.destination, a.owner, greatest(a.available_at, now()), a.expires_at,
                a.headers, a.max_attempts, a.max_attempts
            FROM pgoutbox._bulk_items(
                topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
                headers, max_attempts, ordering_keys, on_failed, max_delays, owners, on_duplicates
            ) AS a
            RETURNING m.id
        )
        SELECT (row_number() OVER (ORDER BY i.id) - 1)::integer, i.id, false
        FROM inserted AS i;
    ELSE
        RETURN QUERY
        WITH item AS MATERIALIZED (
            SELECT a.*, nextval('pgoutbox.message_id_seq') AS id
            FROM pgoutbox._bulk_items(
                topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
                headers, max_attempts, ordering_keys, on_failed, max_delays, owners, on_duplicates
            ) AS a
            WHERE num_nonnulls(a.coalesce_key, a.dedupe_key, a.ordering_key) = 0
        ), inserted AS (
            INSERT INTO pgoutbox.message_live (
                id, topic, payload, queue, destination, owner, available_at, expires_at, headers, max_attempts,
                attempt_budget
            )
            SELECT
                i.id, i.topic, i.payload, i.queue, i.destination,
                i.owner, greatest(i.available_at, now()), i.expires_at,
                i.headers, i.max_attempts, i.max_attempts
            FROM item AS i
        )
        SELECT i.item_index, i.id, false
        FROM item AS i;
        RETURN QUERY
        SELECT k.item_index, k.id, k.duplicate
        FROM pgoutbox._enqueue_keyed(
            topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
            headers, max_attempts, ordering_keys, on_failed, max_delays, owners, on_duplicates
        ) AS k;
    END IF;

    IF notify IS NOT FALSE AND cardinality(topics) > 0 THEN
        PERFORM pgoutbox._notify_workers(r.queue)
        FROM (
            SELECT DISTINCT coalesce(q.queue, 'default') AS queue
            FROM unnest(topics, queues) AS q(topic, queue)
        ) AS r;
    END IF;
END
$function$;

COMMENT ON FUNCTION pgoutbox.enqueue_many IS
    'Enqueue arrays of messages in this transaction; a null array or element means the default.';
