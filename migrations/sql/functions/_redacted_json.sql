-- The structure of a JSON value, without its values. Member names stay if they look like names, and the number of
-- members stays. Deeper levels are left out, so that no payload is too deep for this function.
CREATE FUNCTION pgoutbox._redacted_json(value jsonb, levels integer DEFAULT 8)
RETURNS jsonb
LANGUAGE plpgsql
IMMUTABLE
PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN CASE
        WHEN value IS NULL THEN NULL
        WHEN levels > 0 AND jsonb_typeof(value) = 'object' THEN (
            SELECT coalesce(
                jsonb_object_agg(
                    CASE WHEN member.key ~ '^[A-Za-z_][A-Za-z0-9_.-]{0,39}$' THEN member.key ELSE '(redacted)' END,
                    pgoutbox._redacted_json(member.value, levels - 1)
                ),
                '{}'
            )
            FROM jsonb_each(value) AS member
        )
        WHEN levels > 0 AND jsonb_typeof(value) = 'array' THEN (
            SELECT coalesce(jsonb_agg(pgoutbox._redacted_json(e.element, levels - 1) ORDER BY e.number), '[]')
            FROM jsonb_array_elements(value) WITH ORDINALITY AS e(element, number)
        )
        ELSE to_jsonb('(redacted)'::text)
    END;
END
$function$;
