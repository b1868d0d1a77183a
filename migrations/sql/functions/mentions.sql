-- It searches payloads, so only the owner of the schema may call it, and logins to which the owner grants it. It reads
-- every row of the schema.
CREATE FUNCTION pgoutbox.mentions(texts text[], copies_of bigint[] DEFAULT NULL)
RETURNS TABLE (relation text, field text, id bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    -- The text of a JSON document escapes some characters.
    forms constant text[] := ARRAY(
        SELECT t.text FROM unnest(texts) AS t(text)
        UNION
        SELECT substr(to_json(t.text)::text, 2, length(to_json(t.text)::text) - 2) FROM unnest(texts) AS t(text)
    );
    patterns constant text[] := ARRAY(
        SELECT '%' || regexp_replace(lower(f.text), $form$([%_\\])$form$, $form$\\\1$form$, 'g') || '%'
        FROM unnest(forms) AS f(text)
        WHERE f.text <> ''
    );
BEGIN
    RETURN QUERY
    WITH stored AS (
        SELECT 'message', v.field, m.id, v.value
        FROM pgoutbox.message AS m
        CROSS JOIN LATERAL (
            VALUES
                ('destination', m.destination),
                ('owner', m.owner),
                ('coalesce_key', m.coalesce_key),
                ('dedupe_key', m.dedupe_key),
                ('ordering_key', m.ordering_key),
                ('skip_reason', m.skip_reason),
                ('last_error', m.last_error),
                ('payload', m.payload::text),
                ('headers', m.headers::text)
        ) AS v(field, value)
        -- Most messages match nothing. Testing each value on its own takes many times as long.
        WHERE lower(
            concat_ws(
                E'\n',
                m.destination, m.owner, m.coalesce_key, m.dedupe_key, m.ordering_key, m.skip_reason, m.last_error,
                m.payload::text, m.headers::text
            )
        ) LIKE ANY (patterns)
        UNION ALL
        SELECT 'content', 'body', c.id, c.body::text FROM pgoutbox.content AS c
        UNION ALL
        SELECT 'message', 'attempts', m.id, a.error FROM pgoutbox.message AS m CROSS JOIN jsonb_populate_recordset(NULL::pgoutbox.attempt, m.attempts) AS a
        UNION ALL
        SELECT 'dedupe', v.field, d.message_id, v.value
        FROM pgoutbox.dedupe AS d
        CROSS JOIN LATERAL (VALUES ('dedupe_key', d.dedupe_key), ('owner', d.owner)) AS v(field, value)
        UNION ALL
        SELECT 'key_head', 'key', h.newest_id, h.key FROM pgoutbox.key_head AS h
        UNION ALL
        SELECT 'breaker', v.field, NULL, v.value
        FROM pgoutbox.breaker AS b
        CROSS JOIN LATERAL (VALUES ('key', b.key), ('last_error', b.last_error)) AS v(field, value)
        UNION ALL
        SELECT 'audit', v.field, a.id, v.value
        FROM pgoutbox.audit AS a
        CROSS JOIN LATERAL (
            VALUES ('actor', a.actor), ('origin', a.origin), ('details', a.details::text),
                ('stated', a.stated::text)
        ) AS v(field, value)
    )
    SELECT DISTINCT s.relation, s.field, s.id
    FROM stored AS s(relation, field, id, value)
    WHERE lower(s.value) LIKE ANY (patterns)
        AND s.value <> pgoutbox._erased_text(s.value, forms)
    UNION
    SELECT 'message', 'resend_of', m.id FROM pgoutbox.message AS m WHERE m.resend_of = ANY (copies_of)
    ORDER BY relation, field, id;
END
$function$;

COMMENT ON FUNCTION pgoutbox.mentions IS
    'The rows that contain one of these texts, and the copies of these messages: table, column, and the id of the '
    'message, the act or the content. Encrypted payloads are not searched.';
