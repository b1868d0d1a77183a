-- Give the dedupe keys of the drafts to their messages. Returns for each draft the message that has its key, negative the
-- number of the draft whose message has it, or null if its own message got it. One statement takes the keys that no message
-- has, and those of cancelled, skipped or deleted messages, in their order. It does not lock the others, so that
-- repetitions of a message do not wait for each other. The first draft of a key takes it. The drafts that got no key are
-- compared one by one.
CREATE FUNCTION pgoutbox._take_dedupe_keys(drafts pgoutbox.draft[], ids bigint[])
RETURNS bigint[]
LANGUAGE plpgsql
AS $function$
DECLARE
    reads_committed constant boolean := pgoutbox._reads_committed();
    taken_ids bigint[];
    known_ids bigint[];
    known_id bigint;
    item record;
BEGIN
    WITH first AS (
        SELECT DISTINCT ON (d.topic COLLATE "C", d.dedupe_key COLLATE "C")
            ids[d.ordinality] AS id, d.topic, d.dedupe_key, d.payload, coalesce(d.payload_version, 1) AS payload_version
        FROM unnest(drafts) WITH ORDINALITY AS d
        WHERE d.dedupe_key IS NOT NULL
        ORDER BY d.topic COLLATE "C", d.dedupe_key COLLATE "C", d.ordinality
    ), taken AS (
        -- This waits for a transaction that is inserting the same key, and inserts the row if that one rolls back. A redrive
        -- of a cancelled message has its row locked until its commit, so the last condition looks again after that.
        INSERT INTO pgoutbox.dedupe AS t (message_id, topic, dedupe_key, payload_digest, payload_version)
        SELECT f.id, f.topic, f.dedupe_key, (pgoutbox._payload_digests(f.payload))[1], f.payload_version
        FROM first AS f
        WHERE (
            SELECT o.message_id
            FROM pgoutbox.dedupe AS o
            WHERE reads_committed -- An older snapshot may see a row that is deleted.
                AND o.topic = f.topic
                AND o.dedupe_key = f.dedupe_key
                AND (o.is_kept OR NOT pgoutbox._has_freed_key(o.message_id))
            LIMIT 1
        ) IS NULL
        ON CONFLICT ON CONSTRAINT dedupe_pkey DO UPDATE
        SET message_id = excluded.message_id,
            payload_digest = excluded.payload_digest,
            payload_version = excluded.payload_version,
            created_at = now()
        WHERE NOT t.is_kept AND pgoutbox._has_freed_key(t.message_id)
        RETURNING t.message_id
    )
    SELECT coalesce(array_agg(t.message_id), '{}') INTO taken_ids FROM taken AS t;
    IF cardinality(taken_ids) = cardinality(ids) THEN
        RETURN NULL;
    END IF;
    FOR item IN
        SELECT k.*
        FROM (
            SELECT
                d.ordinality AS n, d.topic, d.dedupe_key,
                first_value(d.ordinality) OVER (
                    PARTITION BY d.topic COLLATE "C", d.dedupe_key COLLATE "C" ORDER BY d.ordinality
                ) AS first_n
            FROM unnest(drafts) WITH ORDINALITY AS d
            WHERE d.dedupe_key IS NOT NULL
        ) AS k
        WHERE ids[k.n] NOT IN (SELECT t.id FROM unnest(taken_ids) AS t(id))
        ORDER BY k.topic COLLATE "C", k.dedupe_key COLLATE "C", k.n
    LOOP
        known_id := pgoutbox._take_dedupe_key(drafts[item.n], ids[item.n]);
        known_ids[item.n] := CASE known_id WHEN ids[item.first_n] THEN -item.first_n ELSE known_id END;
    END LOOP;
    RETURN known_ids;
END
$function$;
