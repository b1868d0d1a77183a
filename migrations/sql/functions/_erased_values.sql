-- An object of an act with (erased) instead of these texts, and instead of values that equal one of the keys. Keys are
-- compared as a whole: as a part of a reason, a key such as `all` is a word like any other. A topic or a queue with the name
-- of an owner stays.
CREATE FUNCTION pgoutbox._erased_values(object jsonb, texts text[], keys text[])
RETURNS jsonb
LANGUAGE sql
IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT jsonb_object_agg(
    d.key,
    CASE
        WHEN jsonb_typeof(d.value) <> 'string' OR d.key IN ('topic', 'queue') THEN d.value
        WHEN d.key IN ('owner', 'key', 'text', 'coalesce_key', 'dedupe_key') AND d.value #>> '{}' = ANY (keys) THEN '"(erased)"'::jsonb
        ELSE to_jsonb(pgoutbox._erased_text(d.value #>> '{}', texts))
    END
)
FROM jsonb_each(object) AS d
$function$;
