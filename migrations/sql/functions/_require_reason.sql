-- Refuse an act without a reason; spaces are none.
CREATE FUNCTION pgoutbox._require_reason(in_function text, reason text)
RETURNS void
LANGUAGE plpgsql
AS $function$
BEGIN
    PERFORM pgoutbox._raise_argument_error('reason: must have 1 to 1000 characters', in_function => in_function)
    WHERE (reason ~ '[^[:space:]]' AND length(reason) <= 1000) IS NOT TRUE;
END
$function$;
