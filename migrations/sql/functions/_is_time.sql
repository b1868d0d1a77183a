-- Whether the text is a time with its zone, which no setting of a session changes.
CREATE FUNCTION pgoutbox._is_time(value text)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    PERFORM value::timestamptz;
    RETURN value ~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)$';
EXCEPTION
    WHEN data_exception THEN
        RETURN false;
END
$function$;
