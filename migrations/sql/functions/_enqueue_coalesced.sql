-- Items whose only key is a coalesce key. The ids are drawn first. If another transaction has written a greater id into
-- the head meanwhile, a new id is drawn while the head is locked. So the order of the newest ids of a key is the order
-- of commits. Earlier items of the same key are superseded at once. The planner does not know how long the arrays are,
-- and would join them row by row.
CREATE FUNCTION pgoutbox._enqueue_coalesced(
    topics text[],
    payloads jsonb[],
    queues text[],
    destinations text[],
    coalesce_keys text[],
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
        SELECT s.*, nextval('pgoutbox.message_id_seq') AS drawn_id
        FROM (
            SELECT a.*, lead(a.item_index) OVER (
                PARTITION BY a.topic COLLATE "C", a.coalesce_key COLLATE "C" ORDER BY a.item_index
            ) IS NULL AS is_newest
            FROM pgoutbox._bulk_items(
                topics, payloads, queues, destinations, coalesce_keys, NULL, available_ats, delays, expires_ats,
                headers, max_attempts, NULL, NULL, NULL, owners, NULL
            ) AS a
            WHERE a.coalesce_key IS NOT NULL
            ORDER BY a.topic COLLATE "C", a.coalesce_key COLLATE "C", a.item_index
        ) AS s
    ), head AS (
        INSERT INTO pgoutbox.coalesce_head AS head (newest_id, topic, coalesce_key)
        SELECT i.drawn_id, i.topic, i.coalesce_key
        FROM item AS i
        WHERE i.is_newest
        ON CONFLICT ON CONSTRAINT coalesce_head_pkey DO UPDATE
        SET newest_id = CASE
            WHEN excluded.newest_id > head.newest_id THEN excluded.newest_id
            ELSE pgoutbox._next_id(head.newest_id)
        END,
            replaced_id = head.newest_id
        RETURNING head.newest_id, head.replaced_id, head.topic, head.coalesce_key
    ), skipped AS MATERIALIZED (
        SELECT pgoutbox._skip_superseded(array_agg(h.replaced_id), array_agg(h.newest_id))
        FROM head AS h
        WHERE h.replaced_id IS NOT NULL
        HAVING count(*) > 0
    ), numbered AS MATERIALIZED (
        SELECT
            i.*,
            CASE WHEN i.is_newest THEN h.newest_id ELSE i.drawn_id END AS id,
            h.newest_id,
            NOT i.is_newest AND i.available_at > now() AS is_ended
        FROM item AS i
        JOIN head AS h ON h.topic = i.topic AND h.coalesce_key = i.coalesce_key
    ), inserted AS (
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, destination, owner, coalesce_key, available_at, expires_at, headers,
            max_attempts, attempt_budget
        )
        SELECT
            n.id, n.topic, n.payload, n.queue, n.destination,
            n.owner, n.coalesce_key, greatest(n.available_at, now()),
            n.expires_at, n.headers, n.max_attempts, n.max_attempts
        FROM numbered AS n
        WHERE n.is_ended IS NOT TRUE
    ), ended AS (
        -- As in _skip_superseded, a superseded message that is not due ends at once.
        INSERT INTO pgoutbox.message (
            id, topic, payload, queue, destination, owner, coalesce_key, available_at, expires_at, headers,
            max_attempts, attempt_budget, state, finished_at, superseded_by, skip_reason
        )
        SELECT
            n.id, n.topic, n.payload, n.queue, n.destination,
            n.owner, n.coalesce_key, n.available_at, n.expires_at, n.headers, n.max_attempts, n.max_attempts,
            'skipped', clock_timestamp(), n.newest_id, 'superseded by ' || n.newest_id
        FROM numbered AS n
        WHERE n.is_ended
    )
    SELECT n.item_index, n.id
    FROM numbered AS n
    WHERE (SELECT count(*) FROM skipped) >= 0;
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue_coalesced IS
    'Enqueue the items of enqueue_many that have only a coalesce key.';
