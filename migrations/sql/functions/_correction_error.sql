CREATE FUNCTION pgoutbox._correction_error(changes jsonb)
RETURNS text
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    name text;
BEGIN
    IF jsonb_typeof(changes) IS DISTINCT FROM 'object' OR changes = '{}' THEN
        RETURN 'changes: must be a JSON object with one of payload, headers, destination, owner and queue';
    END IF;
    FOR name IN SELECT k.name FROM jsonb_object_keys(changes) AS k(name) LOOP
        IF name NOT IN ('payload', 'headers', 'destination', 'owner', 'queue') THEN
            RETURN format('changes: unknown field %I; give payload, headers, destination, owner or queue', name);
        END IF;
        IF name IN ('destination', 'owner') AND jsonb_typeof(changes -> name) NOT IN ('string', 'null') THEN
            RETURN name || ': must be a text, or null for none';
        END IF;
    END LOOP;
    IF changes ? 'queue' AND jsonb_typeof(changes -> 'queue') <> 'string' THEN
        RETURN 'queue: must be a text';
    END IF;
    RETURN pgoutbox._draft_error(pgoutbox._draft('a', coalesce(changes -> 'payload', '1'), changes - 'payload'));
END
$function$;

COMMENT ON FUNCTION pgoutbox._correction_error IS
    'The first invalid field of the changes of a correction, as name and reason; null if all are valid.';
