-- Replace by (erased) what acts state about a person: the addresses, the texts in acts on the erased messages, and
-- values that equal one of the keys. Returns the number of changed acts. Acts repeat the same values, such as topics and
-- states. So each different value is compared once. Only statements and reasons name persons. The rest of details is
-- what the database found, for example a limit or the target of a redirect.
CREATE FUNCTION pgoutbox._erase_in_audit(
    addresses text[], texts text[], keys text[], erased_ids bigint[], only_erased boolean
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    changed_count bigint;
BEGIN
    WITH told AS MATERIALIZED (
        SELECT a.id, v.value #>> '{}' AS text
        FROM pgoutbox.audit AS a
        CROSS JOIN LATERAL (
            SELECT s.value FROM jsonb_each(a.stated) AS s
            UNION ALL
            SELECT a.details -> 'reason'
        ) AS v
        WHERE (a.message_ids && erased_ids OR NOT only_erased)
            AND jsonb_typeof(v.value) = 'string'
    ), word AS MATERIALIZED (
        SELECT DISTINCT lower(t.text) AS text FROM unnest(texts) AS t(text) WHERE t.text <> ''
    ), found AS MATERIALIZED (
        SELECT t.text
        FROM (SELECT DISTINCT d.text FROM told AS d) AS t
        WHERE t.text IN (SELECT unnest(keys))
            OR EXISTS (SELECT FROM word AS w WHERE strpos(lower(t.text), w.text) > 0)
    ), locked AS MATERIALIZED (
        -- In one order, because two erasures may change the same acts.
        SELECT a.id, a.details, a.stated, a.message_ids
        FROM pgoutbox.audit AS a
        WHERE a.id IN (SELECT d.id FROM told AS d JOIN found AS f ON f.text = d.text)
        ORDER BY a.id
        FOR UPDATE
    ), erased AS MATERIALIZED (
        SELECT
            l.id,
            -- Unchanged without a reason.
            l.details || coalesce(
                pgoutbox._erased_values(jsonb_build_object('reason', l.details -> 'reason'), w.words, '{}'), '{}'
            ) AS details,
            pgoutbox._erased_values(l.stated, w.words, keys) AS stated
        FROM locked AS l
        -- The owner may be any word, so it counts only in acts on the erased messages.
        CROSS JOIN LATERAL (SELECT CASE WHEN l.message_ids && erased_ids THEN texts ELSE addresses END AS words) AS w
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
