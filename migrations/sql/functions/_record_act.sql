-- Add a row to the audit, with the announced actor of the transaction, or else the role of the session. The database
-- records each act itself, with the role of the session. Only the actor, the origin and `stated` come from the caller.
CREATE FUNCTION pgoutbox._record_act(
    action text,
    message_ids bigint[] DEFAULT NULL,
    message_count integer DEFAULT NULL,
    queue text DEFAULT NULL,
    details jsonb DEFAULT NULL
)
RETURNS void
LANGUAGE sql
AS $function$
INSERT INTO pgoutbox.audit (act_id, actor, origin, action, queue, message_count, message_ids, details, stated)
SELECT
    coalesce((told.act ->> 'id')::uuid, gen_random_uuid()),
    coalesce(told.act ->> 'actor', session_user),
    told.act ->> 'origin',
    _record_act.action,
    _record_act.queue,
    coalesce(cardinality(_record_act.message_ids), _record_act.message_count),
    _record_act.message_ids,
    _record_act.details,
    nullif(told.act -> 'stated', 'null')
FROM (SELECT pgoutbox._announced()) AS told(act)
WHERE coalesce(cardinality(_record_act.message_ids), _record_act.message_count, 1) > 0
$function$;
