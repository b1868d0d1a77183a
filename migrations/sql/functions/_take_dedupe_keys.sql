-- The first draft of each key takes it, if no message has it. The others are few, and are decided one by one. A key of a
-- cancelled or skipped message is locked when it is taken over: if there is one, all keys are taken one by one, in order.
CREATE FUNCTION pgoutbox._take_dedupe_keys(drafts pgoutbox.draft[], ids bigint[])
RETURNS bigint[]
LANGUAGE plpgsql
AS $function$
DECLARE
    taken_ids bigint[] := '{}';
    known_ids bigint[];
    item record;
BEGIN
    IF cardinality(ids) = 1 OR NOT EXISTS (
        SELECT
        FROM unnest(drafts) AS d
        JOIN pgoutbox.dedupe AS t ON t.topic = d.topic AND t.dedupe_key = d.dedupe_key
        WHERE NOT t.is_kept AND pgoutbox._has_freed_key(t.message_id)
    ) THEN
        WITH first AS (
            SELECT DISTINCT ON (d.topic COLLATE "C", d.dedupe_key COLLATE "C")
                ids[d.ordinality] AS id, d.topic, d.dedupe_key, d.payload
            FROM unnest(drafts) WITH ORDINALITY AS d
            WHERE d.dedupe_key IS NOT NULL
            ORDER BY d.topic COLLATE "C", d.dedupe_key COLLATE "C", d.ordinality
        ), taken AS (
            -- This waits for a transaction that is inserting the same key, and inserts the row if that one rolls back.
            INSERT INTO pgoutbox.dedupe AS t (message_id, topic, dedupe_key, payload_digest)
            SELECT f.id, f.topic, f.dedupe_key, (pgoutbox._payload_digests(f.payload))[1]
            FROM first AS f
            ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING
            RETURNING t.message_id
        )
        SELECT coalesce(array_agg(t.message_id), '{}') INTO taken_ids FROM taken AS t;
        IF cardinality(taken_ids) = cardinality(ids) THEN
            RETURN NULL;
        END IF;
    END IF;
    FOR item IN
        SELECT k.*
        FROM (
            SELECT
                d.ordinality::integer AS n, d.topic, d.dedupe_key, d.payload, d.on_duplicate,
                row_number() OVER (
                    PARTITION BY d.topic COLLATE "C", d.dedupe_key COLLATE "C" ORDER BY d.ordinality
                ) AS rank
            FROM unnest(drafts) WITH ORDINALITY AS d
            WHERE d.dedupe_key IS NOT NULL
        ) AS k
        WHERE ids[k.n] NOT IN (SELECT t.id FROM unnest(taken_ids) AS t(id))
        ORDER BY k.topic COLLATE "C", k.dedupe_key COLLATE "C", k.n
    LOOP
        known_ids[item.n] := pgoutbox._take_dedupe_key(
            item.topic, item.dedupe_key, item.payload, ids[item.n], item.on_duplicate, item.rank = 1
        );
    END LOOP;
    RETURN known_ids;
END
$function$;

COMMENT ON FUNCTION pgoutbox._take_dedupe_keys IS
    'Give the dedupe keys of the drafts to their messages. Returns for each draft the message that has its key, or null '
    'if the new message got it.';
