-- Raise 22004 or 22023 with the name of the argument as column, if there is a problem.
CREATE FUNCTION pgoutbox._raise_argument_error(
    problem text, place text DEFAULT NULL, item_index bigint DEFAULT NULL, in_function text DEFAULT 'enqueue'
)
RETURNS void
LANGUAGE plpgsql
AS $function$
BEGIN
    IF problem IS NULL THEN
        RETURN;
    END IF;
    RAISE EXCEPTION USING
        ERRCODE = CASE WHEN problem ~ '^[a-z_]+: must not be null' THEN '22004' ELSE '22023' END,
        SCHEMA = 'pgoutbox',
        COLUMN = split_part(problem, ':', 1),
        MESSAGE = 'pgoutbox.' || in_function || ': '
            || CASE WHEN place IS NULL THEN '' ELSE place || '[' || item_index || '].' END
            || problem;
END
$function$;
