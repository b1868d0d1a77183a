-- Delete those of the messages that have this owner and this destination, if given, with all that belongs to them.
-- Returns for each id the same result as erase, or changed: it has another owner or destination. The keys of the
-- messages are locked first: while they are, no message of these keys can be enqueued. The statements after that see
-- every message of these keys, and only this transaction can need or free a key. A message whose key is locked by
-- another session is left for another call. So an erased message never leaves an unneeded key behind.
--
-- A key stays if a message that is left needs it, as in _prune_keys: without the head of a coalesce key, a superseded
-- message would be delivered.
--
-- A message may have got another destination since its id was found, so owner and destination are compared under lock.
CREATE FUNCTION pgoutbox._erase(ids bigint[], owner text DEFAULT NULL, destination text DEFAULT NULL)
RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    destinations constant text[] := pgoutbox._destinations_of(_erase.destination);
    by_ids constant boolean := num_nonnulls(_erase.owner, destinations) = 0;
    selection constant jsonb := jsonb_build_object(
        'by', CASE WHEN by_ids THEN 'ids' WHEN _erase.owner IS NOT NULL THEN 'owner' ELSE 'destination' END
    );
    known_ids bigint[];
    head_scopes text[];
    head_keys text[];
    dedupe_ids bigint[];
    pending_ids bigint[];
    gone jsonb;
    erased bigint[];
    left_behind bigint[];
    freed_keys text[];
    requested bigint[];
    addresses text[];
    texts text[];
    keys text[];
    act_count bigint;
BEGIN
    WITH asked AS MATERIALIZED (
        SELECT m.id, m.topic, m.queue, m.coalesce_key, m.dedupe_key, m.ordering_key
        FROM pgoutbox.message AS m
        WHERE m.id = ANY (ids)
    ), head_key AS MATERIALIZED (
        SELECT
            pgoutbox._scope_of(a.topic, a.queue, a.ordering_key) AS scope,
            coalesce(a.coalesce_key, a.ordering_key) AS key
        FROM asked AS a
        WHERE coalesce(a.coalesce_key, a.ordering_key) IS NOT NULL
        UNION
        SELECT h.scope, h.key FROM pgoutbox.key_head AS h WHERE by_ids AND h.newest_id = ANY (ids)
    ), head AS MATERIALIZED (
        SELECT h.scope, h.key
        FROM head_key AS k
        JOIN pgoutbox.key_head AS h ON h.scope = k.scope AND h.key = k.key
        FOR UPDATE OF h SKIP LOCKED
    ), deduped AS MATERIALIZED (
        SELECT d.message_id
        FROM asked AS a
        JOIN pgoutbox.dedupe AS d ON d.topic = a.topic AND d.dedupe_key = a.dedupe_key
        WHERE d.message_id = a.id
        FOR UPDATE OF d SKIP LOCKED
    )
    SELECT
        ARRAY(SELECT a.id FROM asked AS a),
        ARRAY(SELECT h.scope FROM head AS h),
        ARRAY(SELECT h.key FROM head AS h),
        ARRAY(SELECT d.message_id FROM deduped AS d)
    INTO known_ids, head_scopes, head_keys, dedupe_ids;

    pending_ids := pgoutbox._lock_pending(ids);
    WITH locked AS MATERIALIZED (
        SELECT m.id, m.state
        FROM pgoutbox.message AS m
        WHERE m.id = ANY (ids)
            AND m.state IN ('pending', 'sent', 'failed', 'skipped', 'cancelled')
            AND (m.state <> 'pending' OR m.id IN (SELECT p.id FROM unnest(pending_ids) AS p(id)))
            AND (_erase.owner IS NULL OR m.owner = _erase.owner)
            AND (
                destinations IS NULL
                OR m.destination = ANY (destinations)
                OR pgoutbox._is_failure_to(destinations, m.failure_of, m.payload)
            )
            AND NOT EXISTS (
                SELECT
                FROM pgoutbox.key_head AS h
                WHERE h.scope = pgoutbox._scope_of(m.topic, m.queue, m.ordering_key)
                    AND h.key = coalesce(m.coalesce_key, m.ordering_key)
                    AND (h.scope, h.key) NOT IN (SELECT * FROM unnest(head_scopes, head_keys))
            )
            AND NOT EXISTS (
                SELECT
                FROM pgoutbox.dedupe AS d
                WHERE d.topic = m.topic
                    AND d.dedupe_key = m.dedupe_key
                    AND d.message_id = m.id
                    AND d.message_id <> ALL (dedupe_ids)
            )
        FOR UPDATE OF m SKIP LOCKED
    ), deleted AS (
        DELETE FROM pgoutbox.message AS m
        USING locked AS l
        WHERE m.id = l.id
            AND m.state = l.state
            AND m.state IN ('pending', 'sent', 'failed', 'skipped', 'cancelled')
        RETURNING m.*
    )
    SELECT jsonb_agg(to_jsonb(d) - '{payload,headers,attempts}'::text[])
    INTO gone
    FROM deleted AS d;
    gone := coalesce(gone, '[]');
    erased := ARRAY(SELECT (g.one ->> 'id')::bigint FROM jsonb_array_elements(gone) AS g(one));

    DELETE FROM pgoutbox.dedupe AS d
    USING jsonb_array_elements(gone) AS g(one)
    WHERE d.topic = g.one ->> 'topic'
        AND d.dedupe_key = g.one ->> 'dedupe_key'
        AND d.message_id = (g.one ->> 'id')::bigint;
    left_behind := ARRAY(
        SELECT DISTINCT f.id
        FROM pgoutbox._erase_left_behind(
            head_scopes, head_keys,
            CASE WHEN by_ids THEN ARRAY(SELECT a.id FROM unnest(ids) AS a(id) WHERE a.id <> ALL (known_ids)) END
        ) AS f(id)
        WHERE f.id = ANY (ids) AND f.id <> ALL (known_ids)
    );
    -- _forget_sent left these keys without a message.
    WITH freed AS (
        DELETE FROM pgoutbox.dedupe AS d WHERE d.owner = _erase.owner RETURNING d.message_id, d.dedupe_key
    )
    SELECT left_behind || array_agg(f.message_id), array_agg(f.dedupe_key)
    INTO left_behind, freed_keys
    FROM freed AS f;
    -- Another erasure may have deleted the other messages of a content, and not committed. The one that gets this lock
    -- last sees that no message is left.
    PERFORM
    FROM pgoutbox.content AS c
    WHERE c.id IN (SELECT (g.one ->> 'content_id')::bigint FROM jsonb_array_elements(gone) AS g(one))
    ORDER BY c.id
    FOR UPDATE;
    DELETE FROM pgoutbox.content AS c
    WHERE c.id IN (SELECT (g.one ->> 'content_id')::bigint FROM jsonb_array_elements(gone) AS g(one))
        AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.content_id = c.id LIMIT 1) IS NULL;

    -- Messages that waited behind these may follow now.
    PERFORM pgoutbox._wake_all_workers(q.queue)
    FROM (
        SELECT DISTINCT g.one ->> 'queue' AS queue
        FROM jsonb_array_elements(gone) AS g(one)
        WHERE g.one ->> 'ordering_key' IS NOT NULL AND g.one ->> 'state' IN ('pending', 'failed')
    ) AS q;

    SELECT
        -- Without this condition, a made-up destination could erase any words of another one's act.
        array_agg(DISTINCT t.text) FILTER (
            WHERE t.kind = 'address'
                AND t.text ~ '^([^[:space:]]+@[^[:space:]]+|[+][0-9]{6,}|[a-z][a-z0-9+.-]*://[^[:space:]]+)$'
        ),
        array_agg(DISTINCT t.text) FILTER (WHERE t.kind <> 'key'),
        array_agg(DISTINCT t.text)
    INTO addresses, texts, keys
    FROM (
        SELECT g.one ->> n.name, CASE n.name WHEN 'destination' THEN 'address' ELSE 'key' END
        FROM jsonb_array_elements(gone) AS g(one)
        CROSS JOIN unnest('{destination,owner,coalesce_key,dedupe_key,ordering_key}'::text[]) AS n(name)
        UNION ALL
        -- An address, also without its scheme.
        SELECT substring(s.text FROM '^[a-z][a-z0-9+.-]*:([^/].*)$'), 'address'
        FROM (
            SELECT g.one ->> 'destination' FROM jsonb_array_elements(gone) AS g(one)
            UNION ALL
            SELECT _erase.destination
        ) AS s(text)
        UNION ALL
        SELECT k.text, 'key' FROM unnest(freed_keys) AS k(text)
        UNION ALL
        SELECT s.text, 'address' FROM unnest(destinations) AS s(text)
        UNION ALL
        SELECT _erase.owner, 'owner'
    ) AS t(text, kind);
    act_count := pgoutbox._erase_in_audit(addresses, texts, keys, erased || left_behind, by_ids);
    UPDATE pgoutbox.breaker AS b
    SET last_error = pgoutbox._erased_text(b.last_error, texts)
    FROM (
        SELECT open.key
        FROM pgoutbox.breaker AS open
        WHERE open.last_error <> pgoutbox._erased_text(open.last_error, texts)
        -- Only these: workers wait for a locked breaker.
        FOR UPDATE SKIP LOCKED
    ) AS locked
    WHERE b.key = locked.key;

    requested := ARRAY(
        SELECT c.id
        FROM pgoutbox._cancel_unrecorded(
            ARRAY(
                SELECT m.id
                FROM pgoutbox.message_live AS m
                WHERE m.id = ANY (ids)
                    AND m.state = 'sending'
                    AND (_erase.owner IS NULL OR m.owner = _erase.owner)
                    AND (
                        destinations IS NULL
                        OR m.destination = ANY (destinations)
                        OR pgoutbox._is_failure_to(destinations, m.failure_of, m.payload)
                    )
            ),
            '{sending}'
        ) AS c
        WHERE c.result = 'requested'
    );
    FOR id IN SELECT DISTINCT a.id FROM unnest(ids || left_behind) AS a(id) ORDER BY a.id LOOP
        IF id = ANY (erased) OR id = ANY (left_behind) THEN
            result := 'erased';
        ELSIF id = ANY (requested) THEN
            result := 'in_flight';
        ELSE
            SELECT CASE
                WHEN m.owner IS DISTINCT FROM coalesce(_erase.owner, m.owner)
                    OR destinations IS NOT NULL
                    AND (m.destination = ANY (destinations)) IS NOT TRUE
                    AND NOT pgoutbox._is_failure_to(destinations, m.failure_of, m.payload)
                    THEN 'changed'
                ELSE 'locked' -- Or its attempt has just ended: another call erases it.
            END
            INTO result
            FROM pgoutbox.message AS m
            WHERE m.id = _erase.id;
            IF NOT FOUND THEN
                result := 'missing';
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
    PERFORM pgoutbox._record_act('cancel', message_ids => requested, details => selection);
    -- The audit outlives the messages, so it does not name the owner or the address. An erasure that only changed acts is
    -- recorded too: otherwise an operator could change the audit without a trace.
    erased := ARRAY(SELECT e.id FROM unnest(erased || left_behind) AS e(id) ORDER BY e.id);
    IF cardinality(erased) + act_count > 0 THEN
        PERFORM pgoutbox._record_act('erase', message_ids => nullif(erased, '{}'), details => selection);
    END IF;
END
$function$;
