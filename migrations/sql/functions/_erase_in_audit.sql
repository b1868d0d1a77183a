-- Acts repeat the same values, such as topics and states. So each different value is compared once.
CREATE FUNCTION pgoutbox._erase_in_audit(texts text[], keys text[], only_ids bigint[])
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    changed_count bigint;
BEGIN
    WITH detail AS MATERIALIZED (
        SELECT a.id, d.value #>> '{}' AS text
        FROM pgoutbox.audit AS a
        CROSS JOIN LATERAL jsonb_each(CASE WHEN jsonb_typeof(a.details) = 'object' THEN a.details END) AS d
        WHERE (only_ids IS NULL OR a.message_ids && only_ids) AND jsonb_typeof(d.value) = 'string'
    ), word AS MATERIALIZED (
        SELECT DISTINCT lower(t.text) AS text FROM unnest(texts) AS t(text) WHERE t.text <> ''
    ), found AS MATERIALIZED (
        SELECT t.text
        FROM (SELECT DISTINCT d.text FROM detail AS d) AS t
        WHERE t.text IN (SELECT unnest(keys))
            OR EXISTS (SELECT FROM word AS w WHERE strpos(lower(t.text), w.text) > 0)
    ), locked AS MATERIALIZED (
        -- In one order, because two erasures may change the same acts.
        SELECT a.id, a.details
        FROM pgoutbox.audit AS a
        WHERE a.id IN (SELECT d.id FROM detail AS d JOIN found AS f ON f.text = d.text)
        ORDER BY a.id
        FOR UPDATE
    ), erased AS MATERIALIZED (
        SELECT l.id, l.details, pgoutbox._erased_values(l.details, texts, keys) AS new_details FROM locked AS l
    ), changed AS (
        UPDATE pgoutbox.audit AS a
        SET details = e.new_details
        FROM erased AS e
        WHERE a.id = e.id AND e.details <> e.new_details
        RETURNING a.id
    )
    SELECT count(*) INTO changed_count FROM changed;
    RETURN changed_count;
END
$function$;

COMMENT ON FUNCTION pgoutbox._erase_in_audit IS
    'Replace these texts by (erased) in the details of all acts, or of those on these messages, and also values that '
    'equal one of the keys. Returns the number of changed acts.';
