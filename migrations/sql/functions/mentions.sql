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
        SELECT
            'message',
            m.id,
            '{destination,owner,coalesce_key,dedupe_key,ordering_key,fair_key,skip_reason,last_error}'::text[]
                || '{payload,headers,attempts}'::text[],
            ARRAY[
                m.destination, m.owner, m.coalesce_key, m.dedupe_key, m.ordering_key, m.fair_key, m.skip_reason,
                m.last_error, m.payload::text, m.headers::text, m.attempts::text
            ]
        FROM pgoutbox.message AS m
        UNION ALL
        SELECT 'content', c.id, '{body}', ARRAY[c.body::text] FROM pgoutbox.content AS c
        UNION ALL
        SELECT 'dedupe', d.message_id, '{dedupe_key,owner}', ARRAY[d.dedupe_key, d.owner] FROM pgoutbox.dedupe AS d
        UNION ALL
        SELECT 'key_head', h.newest_id, '{key}', ARRAY[h.key] FROM pgoutbox.key_head AS h
        UNION ALL
        SELECT
            'audit',
            a.id,
            '{actor,db_role,origin,details,stated}',
            ARRAY[a.actor, a.db_role, a.origin, a.details::text, a.stated::text]
        FROM pgoutbox.audit AS a
        UNION ALL
        SELECT 'breaker', NULL, '{key,last_error,holds}', ARRAY[b.key, b.last_error, b.holds::text]
        FROM pgoutbox.breaker AS b
        UNION ALL
        SELECT 'redirect', NULL, '{target,set_by}', ARRAY[r.target, r.set_by] FROM pgoutbox.redirect AS r
        UNION ALL
        SELECT 'worker', NULL, '{redirect_to,failures}', ARRAY[w.redirect_to, w.failures::text] FROM pgoutbox.worker AS w
        UNION ALL
        SELECT 'home', NULL, '{adopted_by}', ARRAY[h.adopted_by] FROM pgoutbox.home AS h
        UNION ALL
        SELECT 'fair_share', NULL, '{fair_key,after_key}', ARRAY[f.fair_key, f.after_key] FROM pgoutbox.fair_share AS f
        UNION ALL
        SELECT 'schedule', NULL, '{message}', ARRAY[s.message::text] FROM pgoutbox.schedule AS s
    )
    SELECT s.relation, f.field, s.id
    FROM stored AS s(relation, id, fields, texts)
    CROSS JOIN LATERAL unnest(s.fields, s.texts) AS f(field, text)
    -- Most rows match nothing. Testing each text on its own takes many times as long. The keys have the collation C, in
    -- which only ASCII letters have a case.
    WHERE lower(array_to_string(s.texts, E'\n') COLLATE "default") LIKE ANY (patterns)
        AND lower(f.text COLLATE "default") LIKE ANY (patterns)
        AND f.text <> pgoutbox._erased_text(f.text COLLATE "default", forms)
    UNION
    SELECT 'message', 'resend_of', m.id FROM pgoutbox.message AS m WHERE m.resend_of = ANY (copies_of)
    ORDER BY relation, field, id;
END
$function$;
