-- Replace by (erased) the texts that name a person in acts: in the reason, in the fair key of a share, and in the values that
-- their callers stated. The rest of details is what the database found, for example a limit or the target of a redirect.
-- Returns the number of changed acts.
--
-- The fair key and some stated values are also compared with the keys, as a whole: as a part of a reason, a key such as `all` is a word
-- like any other. A topic or a queue with the name of an owner stays.
CREATE FUNCTION pgoutbox._erase_in_audit(texts text[], keys text[], erased_ids bigint[], only_erased boolean)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
DECLARE
    -- Only these count in acts on other messages. Otherwise a made-up owner or destination could erase any words there.
    addresses constant text[] := ARRAY(
        SELECT t.text
        FROM unnest(texts) AS t(text)
        WHERE t.text ~ '^([^[:space:]]+@[^[:space:]]+|[+][0-9]{6,}|[a-z][a-z0-9+.-]*://[^[:space:]]+)$'
    );
    changed_count bigint;
BEGIN
    WITH told AS MATERIALIZED (
        SELECT a.id, v.value #>> '{}' AS text
        FROM pgoutbox.audit AS a
        CROSS JOIN LATERAL (
            SELECT s.value FROM jsonb_each(a.stated) AS s
            UNION ALL
            SELECT a.details -> 'reason'
            UNION ALL
            SELECT a.details -> 'fair_key'
        ) AS v
        WHERE (a.message_ids && erased_ids OR NOT only_erased)
            AND jsonb_typeof(v.value) = 'string'
    ), word AS MATERIALIZED (
        SELECT DISTINCT lower(t.text) AS text FROM unnest(texts) AS t(text) WHERE t.text <> ''
    ), found AS MATERIALIZED (
        -- Acts repeat the same values, such as topics and states. So each different value is compared once.
        SELECT d.text
        FROM (SELECT DISTINCT t.text FROM told AS t) AS d
        WHERE d.text IN (SELECT unnest(keys))
            OR EXISTS (SELECT FROM word AS w WHERE strpos(lower(d.text), w.text) > 0)
    ), locked AS MATERIALIZED (
        -- In one order, because two erasures may change the same acts.
        SELECT a.id, a.details, a.stated, CASE WHEN a.message_ids && erased_ids THEN texts ELSE addresses END AS words
        FROM pgoutbox.audit AS a
        WHERE a.id IN (SELECT t.id FROM told AS t JOIN found AS f ON f.text = t.text)
        ORDER BY a.id
        FOR UPDATE
    ), erased AS MATERIALIZED (
        SELECT
            l.id,
            l.details || jsonb_strip_nulls(
                jsonb_build_object(
                    'reason', pgoutbox._erased_text(l.details ->> 'reason', l.words),
                    'fair_key',
                    CASE
                        WHEN l.details ->> 'fair_key' = ANY (keys) THEN '(erased)'
                        ELSE pgoutbox._erased_text(l.details ->> 'fair_key', l.words)
                    END
                )
            ) AS details,
            (
                SELECT jsonb_object_agg(
                    s.key,
                    CASE
                        WHEN jsonb_typeof(s.value) <> 'string' OR s.key IN ('topic', 'queue') THEN s.value
                        WHEN s.key IN ('owner', 'key', 'text', 'coalesce_key', 'dedupe_key') AND s.value #>> '{}' = ANY (keys)
                            THEN '"(erased)"'
                        ELSE to_jsonb(pgoutbox._erased_text(s.value #>> '{}', l.words))
                    END
                )
                FROM jsonb_each(l.stated) AS s
            ) AS stated
        FROM locked AS l
    ), changed AS (
        UPDATE pgoutbox.audit AS a
        SET details = e.details, stated = e.stated
        FROM erased AS e
        WHERE a.id = e.id AND (a.details, a.stated) IS DISTINCT FROM (e.details, e.stated)
        RETURNING a.id
    )
    SELECT count(*) INTO changed_count FROM changed;
    RETURN changed_count;
END
$function$;
