-- Keys are compared as a whole: as a part of a reason, a key such as `all` is a word like any other.
CREATE FUNCTION pgoutbox._erased_values(details jsonb, texts text[], keys text[])
RETURNS jsonb
LANGUAGE sql
IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT jsonb_object_agg(
    d.key,
    CASE
        WHEN jsonb_typeof(d.value) <> 'string' THEN d.value
        WHEN d.value #>> '{}' = ANY (keys) THEN '"(erased)"'::jsonb
        ELSE to_jsonb(pgoutbox._erased_text(d.value #>> '{}', texts))
    END
)
FROM jsonb_each(details) AS d
$function$;

COMMENT ON FUNCTION pgoutbox._erased_values IS
    'The details of an act with (erased) instead of these texts, and instead of values that equal one of the keys.';
