-- cancel for several messages, as one act. The audit gets one row for all messages of the call. Cancels of applications in
-- their business transactions are not acts.
CREATE FUNCTION pgoutbox._cancel_each(message_ids bigint[], states text[])
RETURNS SETOF pgoutbox.act_result
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
WITH each AS MATERIALIZED (
    SELECT c.id, c.result FROM pgoutbox._cancel_unrecorded(message_ids, states) AS c
), recorded AS MATERIALIZED (
    SELECT pgoutbox._record_act('cancel', message_ids => array_agg(e.id ORDER BY e.id))
    FROM each AS e
    WHERE e.result IN ('cancelled', 'requested')
    HAVING count(*) > 0 AND pgoutbox._is_act()
)
SELECT e.id, e.result, NULL, NULL::bigint
FROM each AS e
WHERE (SELECT count(*) FROM recorded) >= 0
ORDER BY e.id
$function$;
