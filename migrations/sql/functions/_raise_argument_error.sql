CREATE FUNCTION pgoutbox._raise_argument_error(problem text, item_index integer DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
AS $function$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = CASE WHEN strpos(problem, 'must not be null') > 0 THEN '22004' ELSE '22023' END,
        SCHEMA = 'pgoutbox',
        COLUMN = split_part(problem, ':', 1),
        MESSAGE = 'pgoutbox.enqueue: '
            || CASE WHEN item_index IS NULL THEN '' ELSE 'items[' || item_index || '].' END
            || problem;
END
$function$;

COMMENT ON FUNCTION pgoutbox._raise_argument_error IS 'Raise 22004 or 22023 with the name of the argument as column.';
