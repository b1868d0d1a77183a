-- cancel for several messages, as one act. The audit gets one row for all messages of the call. Cancels of applications in
-- their business transactions are not acts.
CREATE FUNCTION pgoutbox._cancel_each(message_ids bigint[], states text[])
RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    stopped bigint[] := '{}';
BEGIN
    FOR id, result IN
        SELECT c.id, c.result FROM pgoutbox._cancel_unrecorded(message_ids, states) AS c ORDER BY c.id
    LOOP
        IF result IN ('cancelled', 'requested') THEN
            stopped := stopped || id;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('cancel', message_ids => stopped);
    END IF;
END
$function$;
