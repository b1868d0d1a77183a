-- Lock the ordering and coalesce keys of the drafts. Returns the ids of their messages, the messages that they supersede,
-- and the latest due time of each draft with a max_delay. Every key is locked by one statement. Its new messages keep the
-- ids that were drawn before, unless a transaction that drew later has committed meanwhile. Then they get ids that are
-- drawn under the lock. So the ids of a key have the order of the commits, and a message is superseded if the head of its
-- coalesce key names a greater id. Each newer message of a coalesce key restarts its delay, up to max_delay after the first
-- of the fresh messages that wait at the key was enqueued.
CREATE FUNCTION pgoutbox._take_keys(
    drafts pgoutbox.draft[],
    INOUT ids bigint[],
    known_ids bigint[],
    OUT older_ids bigint[],
    OUT latest_at timestamptz[]
)
LANGUAGE plpgsql
AS $function$
DECLARE
    is_done boolean;
    has_waits boolean;
    drawn_ids bigint[];
BEGIN
    WITH item AS MATERIALIZED (
        SELECT
            ids[d.ordinality] AS id,
            pgoutbox._scope_of(d.topic, d.queue, d.ordering_key) COLLATE "C" AS scope,
            coalesce(d.coalesce_key, d.ordering_key) COLLATE "C" AS key,
            d.max_delay
        FROM unnest(drafts) WITH ORDINALITY AS d
        WHERE coalesce(d.coalesce_key, d.ordering_key) IS NOT NULL AND known_ids[d.ordinality] IS NULL
    ), head AS (
        INSERT INTO pgoutbox.key_head AS head (newest_id, scope, key)
        SELECT min(i.id), i.scope, i.key
        FROM item AS i
        GROUP BY i.scope, i.key
        ORDER BY i.scope, i.key
        ON CONFLICT ON CONSTRAINT key_head_pkey DO UPDATE
        SET newest_id = greatest(excluded.newest_id, head.newest_id), replaced_id = head.newest_id
        RETURNING head.newest_id, head.replaced_id, head.scope
    )
    SELECT
        (SELECT count(*) FROM item) = (SELECT count(*) FROM head AS h WHERE h.newest_id IS DISTINCT FROM h.replaced_id),
        (SELECT array_agg(h.replaced_id) FROM head AS h WHERE h.replaced_id IS NOT NULL AND h.scope NOT LIKE '/%'),
        EXISTS (SELECT FROM item AS i WHERE i.max_delay IS NOT NULL)
    INTO is_done, older_ids, has_waits;
    IF has_waits THEN
        -- A statement of its own: it sees the messages of a transaction for which the lock has waited.
        INSERT INTO pgoutbox.key_head AS head (newest_id, scope, key)
        SELECT DISTINCT 0, d.topic, d.coalesce_key
        FROM unnest(drafts) WITH ORDINALITY AS d
        WHERE d.max_delay IS NOT NULL AND known_ids[d.ordinality] IS NULL
        ON CONFLICT ON CONSTRAINT key_head_pkey DO UPDATE
        SET waiting_since = CASE
            WHEN EXISTS (
                SELECT
                FROM pgoutbox.message_live AS m
                WHERE m.id = head.replaced_id AND m.state = 'pending' AND m.attempt_count = 0
            ) THEN coalesce(head.waiting_since, now())
            ELSE now()
        END;
        latest_at := ARRAY(
            SELECT d.max_delay + (
                SELECT h.waiting_since
                FROM pgoutbox.key_head AS h
                WHERE h.scope = d.topic AND h.key = d.coalesce_key
                ORDER BY h.newest_id DESC -- An old snapshot may see a deleted row too.
                LIMIT 1
            )
            FROM unnest(drafts) WITH ORDINALITY AS d
            ORDER BY d.ordinality
        );
    END IF;
    IF is_done THEN
        RETURN;
    END IF;

    -- Two drafts have one key, or another transaction has written a greater id into the head.
    drawn_ids := ids;
    ids := ARRAY(
        SELECT CASE WHEN k.newest_id = k.replaced_id THEN pgoutbox._next_id(k.newest_id) ELSE ids[d.ordinality] END
        FROM unnest(drafts) WITH ORDINALITY AS d
        LEFT JOIN LATERAL (
            SELECT h.newest_id, h.replaced_id
            FROM pgoutbox.key_head AS h
            WHERE h.scope = pgoutbox._scope_of(d.topic, d.queue, d.ordering_key)
                AND h.key = coalesce(d.coalesce_key, d.ordering_key)
                AND known_ids[d.ordinality] IS NULL
            LIMIT 1
        ) AS k ON true
        ORDER BY d.ordinality
    );
    WITH item AS MATERIALIZED (
        SELECT
            ids[d.ordinality] AS id,
            pgoutbox._scope_of(d.topic, d.queue, d.ordering_key) COLLATE "C" AS scope,
            coalesce(d.coalesce_key, d.ordering_key) COLLATE "C" AS key
        FROM unnest(drafts) WITH ORDINALITY AS d
        WHERE coalesce(d.coalesce_key, d.ordering_key) IS NOT NULL AND known_ids[d.ordinality] IS NULL
    ), head AS (
        INSERT INTO pgoutbox.key_head AS head (newest_id, scope, key)
        SELECT max(i.id), i.scope, i.key
        FROM item AS i
        GROUP BY i.scope, i.key
        ON CONFLICT ON CONSTRAINT key_head_pkey DO UPDATE
        SET newest_id = excluded.newest_id
        RETURNING head.replaced_id, head.scope
    ), older AS (
        SELECT h.replaced_id FROM head AS h WHERE h.replaced_id IS NOT NULL AND h.scope NOT LIKE '/%'
        UNION ALL
        SELECT w.id
        FROM (
            SELECT i.id, max(i.id) OVER (PARTITION BY i.scope, i.key) AS newest_id
            FROM item AS i
            WHERE i.scope NOT LIKE '/%'
        ) AS w
        WHERE w.id < w.newest_id
    )
    SELECT array_agg(o.id) INTO older_ids FROM older AS o(id);
    -- The rows of these dedupe keys belong to this transaction.
    INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest)
    SELECT ids[d.ordinality], d.topic, d.dedupe_key, ''
    FROM unnest(drafts) WITH ORDINALITY AS d
    WHERE d.dedupe_key IS NOT NULL
        AND known_ids[d.ordinality] IS NULL
        AND ids[d.ordinality] <> drawn_ids[d.ordinality]
    ON CONFLICT ON CONSTRAINT dedupe_pkey DO UPDATE
    SET message_id = excluded.message_id;
END
$function$;
