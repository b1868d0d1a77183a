-- Delete those of the messages that have this owner and this destination, if given, with all that belongs to them, and the
-- schedules of this owner or to this destination.
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
    by_ids constant boolean := num_nonnulls(_erase.owner, _erase.destination) = 0;
    selection constant jsonb := jsonb_build_object(
        'by', CASE WHEN by_ids THEN 'ids' WHEN _erase.owner IS NOT NULL THEN 'owner' ELSE 'destination' END
    );
    missing_ids bigint[];
    head_scopes text[];
    head_keys text[];
    dedupe_ids bigint[];
    pending_ids bigint[];
    erased bigint[];
    left_behind bigint[];
    requested bigint[];
    content_ids bigint[];
    freed_queues text[];
    texts text[];
    keys text[];
    act_count bigint;
BEGIN
    DELETE FROM pgoutbox.schedule AS s
    WHERE NOT by_ids
        AND (_erase.owner IS NULL OR s.message ->> 'owner' = _erase.owner)
        AND (
            _erase.destination IS NULL
            OR s.message ->> 'destination' IN (_erase.destination, 'mailto:' || _erase.destination)
        );
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
        CASE WHEN by_ids THEN ARRAY(SELECT i.id FROM unnest(ids) AS i(id) EXCEPT SELECT a.id FROM asked AS a) END,
        ARRAY(SELECT h.scope FROM head AS h),
        ARRAY(SELECT h.key FROM head AS h),
        ARRAY(SELECT d.message_id FROM deduped AS d)
    INTO missing_ids, head_scopes, head_keys, dedupe_ids;

    pending_ids := pgoutbox._lock_pending(ids);
    WITH locked AS MATERIALIZED (
        SELECT m.id, m.state
        FROM pgoutbox.message AS m
        WHERE m.id = ANY (ids)
            AND m.state IN ('pending', 'sent', 'failed', 'skipped', 'cancelled')
            AND (m.state <> 'pending' OR m.id IN (SELECT p.id FROM unnest(pending_ids) AS p(id)))
            AND pgoutbox._belongs_to(m, _erase.owner, _erase.destination)
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
        RETURNING
            m.id, m.state, m.topic, m.queue, m.content_id,
            m.destination, m.owner, m.coalesce_key, m.dedupe_key, m.ordering_key
    ), freed AS (
        DELETE FROM pgoutbox.dedupe AS d
        USING deleted AS g
        WHERE d.topic = g.topic AND d.dedupe_key = g.dedupe_key AND d.message_id = g.id
    )
    SELECT
        coalesce(array_agg(g.id), '{}'),
        array_agg(DISTINCT g.content_id),
        array_agg(DISTINCT g.queue) FILTER (WHERE g.ordering_key IS NOT NULL AND g.state IN ('pending', 'failed')),
        array_agg(DISTINCT g.destination),
        array_agg(DISTINCT g.owner) || array_agg(DISTINCT g.coalesce_key) || array_agg(DISTINCT g.dedupe_key)
            || array_agg(DISTINCT g.ordering_key)
    INTO erased, content_ids, freed_queues, texts, keys
    FROM deleted AS g;

    left_behind := ARRAY(
        SELECT f.id
        FROM pgoutbox._erase_left_behind(head_scopes, head_keys, missing_ids) AS f(id)
        WHERE f.id = ANY (missing_ids)
    );
    -- _forget_sent left these keys without a message.
    WITH freed AS (
        DELETE FROM pgoutbox.dedupe AS d WHERE d.owner = _erase.owner RETURNING d.message_id, d.dedupe_key
    )
    SELECT left_behind || array_agg(f.message_id), keys || array_agg(f.dedupe_key)
    INTO left_behind, keys
    FROM freed AS f;
    erased := ARRAY(SELECT DISTINCT e.id FROM unnest(erased || left_behind) AS e(id) ORDER BY e.id);

    -- Another erasure may have deleted the other messages of a content, and not committed. The one that gets this lock
    -- last sees that no message is left.
    PERFORM
    FROM pgoutbox.content AS c
    WHERE c.id = ANY (content_ids)
    ORDER BY c.id
    FOR UPDATE;
    DELETE FROM pgoutbox.content AS c
    WHERE c.id = ANY (content_ids)
        AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.content_id = c.id LIMIT 1) IS NULL;
    -- Messages that waited behind these may follow now.
    PERFORM pgoutbox._wake_all_workers(f.queue) FROM unnest(freed_queues) AS f(queue);

    texts := texts || ARRAY[_erase.destination, 'mailto:' || _erase.destination];
    texts := ARRAY(
        SELECT d.uri FROM unnest(texts) AS d(uri)
        UNION
        SELECT substring(d.uri FROM '^[a-z][a-z0-9+.-]*:([^/].*)$') FROM unnest(texts) AS d(uri)
        UNION
        SELECT _erase.owner
    );
    act_count := pgoutbox._erase_in_audit(texts, keys || texts, erased, by_ids);
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
                FROM pgoutbox.message AS m
                WHERE m.id = ANY (ids)
                    AND m.state = 'sending'
                    AND pgoutbox._belongs_to(m, _erase.owner, _erase.destination)
            ),
            '{sending}'
        ) AS c
        WHERE c.result = 'requested'
    );
    RETURN QUERY
    SELECT
        a.id,
        CASE
            WHEN a.id IN (SELECT unnest(erased)) THEN 'erased'
            WHEN a.id IN (SELECT unnest(requested)) THEN 'in_flight'
            ELSE coalesce(
                (
                    -- A message that is left may also have just ended its attempt: another call erases it.
                    SELECT CASE
                        WHEN pgoutbox._belongs_to(m, _erase.owner, _erase.destination) THEN 'locked' ELSE 'changed'
                    END
                    FROM pgoutbox.message AS m
                    WHERE m.id = a.id
                ),
                'missing'
            )
        END
    FROM (SELECT DISTINCT unnest(ids || erased)) AS a(id)
    ORDER BY a.id;
    PERFORM pgoutbox._record_act('cancel', message_ids => requested, details => selection);
    -- The audit outlives the messages, so it does not name the owner or the address. An erasure that only changed acts
    -- is recorded too: otherwise an operator could change the audit without a trace.
    IF cardinality(erased) + act_count > 0 THEN
        PERFORM pgoutbox._record_act('erase', message_ids => nullif(erased, '{}'), details => selection);
    END IF;
END
$function$;
