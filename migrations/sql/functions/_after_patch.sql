-- A JSON value after a merge patch: members of the patch replace those of the value, and null removes them. RFC 7396.
-- It recurses into the members of the patch alone.
CREATE FUNCTION pgoutbox._after_patch(target jsonb, patch jsonb)
RETURNS jsonb
LANGUAGE plpgsql
IMMUTABLE
AS $function$
DECLARE
    merged jsonb := CASE WHEN jsonb_typeof(target) = 'object' THEN target ELSE '{}' END;
    change record;
BEGIN
    IF jsonb_typeof(patch) <> 'object' THEN
        RETURN patch;
    END IF;
    FOR change IN SELECT m.key, m.value FROM jsonb_each(patch) AS m LOOP
        IF change.value = 'null' THEN
            merged := merged - change.key;
        ELSE
            merged := merged
                || jsonb_build_object(change.key, pgoutbox._after_patch(merged -> change.key, change.value));
        END IF;
    END LOOP;
    RETURN merged;
END
$function$;
