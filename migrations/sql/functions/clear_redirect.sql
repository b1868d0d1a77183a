-- Switch the redirect off, and make up to at_most messages that it held back due in two seconds. Returns whether it was
-- on, and the number of these messages.
--
-- Workers may rely on what they have read for two seconds. So the messages that it held back fall due after two seconds:
-- a worker that still took it for switched on would hold them back again. Workers whose environment has a redirect hold
-- them back again too.
CREATE FUNCTION pgoutbox.clear_redirect(at_most bigint DEFAULT 10000)
RETURNS TABLE (was_on boolean, message_count bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
BEGIN
    PERFORM pgoutbox._raise_argument_error('at_most: must be at least 1', in_function => 'clear_redirect')
    WHERE (clear_redirect.at_most >= 1) IS NOT TRUE;
    WITH cleared AS (
        DELETE FROM pgoutbox.redirect AS r
        RETURNING (r.until_at > clock_timestamp()) IS NOT FALSE AS was_on
    )
    SELECT coalesce(bool_or(c.was_on), false) INTO was_on FROM cleared AS c;
    message_count := pgoutbox._make_due(
        'reason_code', 'redirect', now() + interval '2 seconds', clear_redirect.at_most
    );
    IF was_on OR message_count > 0 THEN
        PERFORM pgoutbox._record_act('redirect', details => '{"target": "none"}');
    END IF;
    RETURN NEXT;
END
$function$;
