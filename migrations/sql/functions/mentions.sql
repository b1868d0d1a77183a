-- The rows that contain one of these texts, and the copies of these messages: table, column, and the id of the message,
-- the act or the content. Encrypted payloads are not searched.
--
-- It searches payloads, so only the owner of the schema may call it, and logins to which the owner grants it. It reads
-- every row of the schema. This is the one list of the columns that may name a person. The other columns, with the
-- reason, are in tests/operations/test_mentions.py.
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
        SELECT t.text FROM unnest(texts) AS t(text) WHERE t.text <> ''
        UNION
        SELECT regexp_replace(to_json(t.text)::text, '^"|"$', '', 'g') FROM unnest(texts) AS t(text) WHERE t.text <> ''
    );
    patterns constant text[] := ARRAY(
        SELECT '%' || regexp_replace(lower(f.text), $form$([%_\\])$form$, $form$\\\1$form$, 'g') || '%'
        FROM unnest(forms) AS f(text)
    );
BEGIN
    RETURN QUERY
    WITH stored AS (
        SELECT 'message' AS relation, m.id, to_jsonb(m) AS columns FROM pgoutbox.message AS m
        UNION ALL
        SELECT 'content', c.id, to_jsonb(c) FROM pgoutbox.content AS c
        UNION ALL
        SELECT 'dedupe', d.message_id, to_jsonb(d) FROM pgoutbox.dedupe AS d
        UNION ALL
        SELECT 'key_head', h.newest_id, to_jsonb(h) FROM pgoutbox.key_head AS h
        UNION ALL
        SELECT 'audit', a.id, to_jsonb(a) FROM pgoutbox.audit AS a
        UNION ALL
        SELECT 'breaker', NULL, to_jsonb(b) FROM pgoutbox.breaker AS b
        UNION ALL
        SELECT 'redirect', NULL, to_jsonb(r) FROM pgoutbox.redirect AS r
        UNION ALL
        SELECT 'worker', NULL, to_jsonb(w) FROM pgoutbox.worker AS w
        UNION ALL
        SELECT 'home', NULL, to_jsonb(h) FROM pgoutbox.home AS h
    )
    SELECT s.relation, f.field, s.id
    FROM stored AS s
    CROSS JOIN LATERAL jsonb_each_text(s.columns) AS f(field, text)
    WHERE f.field = ANY (
            '{destination,owner,coalesce_key,dedupe_key,ordering_key,skip_reason,last_error,payload,headers,attempts,body,'
            'key,actor,db_role,origin,details,stated,holds,target,set_by,redirect_to,failures,adopted_by}'::text[]
        )
        AND lower(f.text) LIKE ANY (patterns)
        AND f.text <> pgoutbox._erased_text(f.text, forms)
    UNION
    SELECT 'message', 'resend_of', m.id FROM pgoutbox.message AS m WHERE m.resend_of = ANY (copies_of)
    ORDER BY relation, field, id;
END
$function$;
