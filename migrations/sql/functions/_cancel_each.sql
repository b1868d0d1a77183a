-- cancel for several messages, as one act. The audit gets one row for all messages of the call. Cancels of applications in
-- their business transactions are not acts.
CREATE FUNCTION pgoutbox._cancel_each(message_ids bigint[], states text[])
RETURNS SETOF pgoutbox.act_result
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    stopped bigint[] := '{}';
    one record;
BEGIN
    FOR one IN SELECT c.* FROM pgoutbox._cancel_unrecorded(message_ids, states) AS c ORDER BY c.id LOOP
        IF one.result IN ('cancelled', 'requested') THEN
            stopped := stopped || one.id;
        END IF;
        RETURN NEXT ROW(one.id, one.result, NULL, NULL)::pgoutbox.act_result;
    END LOOP;
    IF pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('cancel', message_ids => stopped);
    END IF;
END
$function$;
