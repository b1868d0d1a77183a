-- Every transaction locks ordering keys first, then coalesce keys, then dedupe keys, and keys of one kind in their
-- order. So two bulks do not wait for each other in a circle. (Messages with two keys that combine them differently
-- can; then PostgreSQL ends one of the two.) Messages of one coalesce or ordering key keep the order of the items. A
-- bulk that has only coalesce keys, or only dedupe keys, is written by one statement. A freed dedupe key is locked by a
-- statement of its own, so then all keys of the bulk are taken one by one.
CREATE FUNCTION pgoutbox._enqueue_keyed(
    topics text[],
    payloads jsonb[],
    queues text[],
    destinations text[],
    coalesce_keys text[],
    dedupe_keys text[],
    available_ats timestamptz[],
    delays double precision[],
    expires_ats timestamptz[],
    headers jsonb[],
    max_attempts integer[],
    ordering_keys text[],
    on_failed text[],
    max_delays double precision[],
    owners text[],
    on_duplicates text[]
)
RETURNS TABLE (item_index integer, id bigint, duplicate boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    item record;
    receipt bigint;
    written_indexes integer[];
    written_ids bigint[];
BEGIN
    IF num_nonnulls(dedupe_keys, ordering_keys, max_delays) = 0 THEN
        RETURN QUERY
        SELECT c.item_index, c.id, false
        FROM pgoutbox._enqueue_coalesced(
            topics, payloads, queues, destinations, coalesce_keys, available_ats, delays, expires_ats, headers,
            max_attempts, owners
        ) AS c;
        RETURN;
    END IF;
    IF num_nonnulls(coalesce_keys, ordering_keys) = 0 AND NOT pgoutbox._has_freed_keys(topics, dedupe_keys) THEN
        SELECT array_agg(d.item_index), array_agg(d.id)
        INTO written_indexes, written_ids
        FROM pgoutbox._enqueue_deduped(
            topics, payloads, queues, destinations, dedupe_keys, available_ats, delays, expires_ats, headers,
            max_attempts, owners
        ) AS d;
        RETURN QUERY
        SELECT w.item_index, w.id, false
        FROM unnest(written_indexes, written_ids) AS w(item_index, id);
        IF cardinality(written_indexes) = cardinality(array_remove(dedupe_keys, NULL)) THEN
            RETURN;
        END IF;
    END IF;
    FOR item IN
        SELECT a.*
        FROM pgoutbox._bulk_items(
            topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
            headers, max_attempts, ordering_keys, on_failed, max_delays, owners, on_duplicates
        ) AS a
        WHERE num_nonnulls(a.coalesce_key, a.dedupe_key, a.ordering_key) > 0
            AND a.item_index NOT IN (SELECT unnest(written_indexes))
        ORDER BY
            CASE WHEN a.ordering_key IS NOT NULL THEN a.queue END COLLATE "C",
            a.ordering_key COLLATE "C",
            CASE WHEN a.coalesce_key IS NOT NULL THEN a.topic END COLLATE "C",
            a.coalesce_key COLLATE "C",
            CASE WHEN a.ordering_key IS NULL THEN a.topic END COLLATE "C",
            CASE WHEN num_nonnulls(a.ordering_key, a.coalesce_key) = 0 THEN a.dedupe_key END COLLATE "C",
            a.item_index
    LOOP
        receipt := pgoutbox._enqueue_checked(
            item.topic, item.payload, item.queue, item.destination, item.coalesce_key, item.dedupe_key,
            item.available_at, item.expires_at, item.headers, item.max_attempts, item.ordering_key, item.on_failed,
            item.max_delay, item.owner, item.on_duplicate, false
        );
        item_index := item.item_index;
        id := abs(receipt);
        duplicate := receipt < 0;
        RETURN NEXT;
    END LOOP;
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue_keyed IS
    'Enqueue the items of enqueue_many that have keys, in the order of the keys.';
