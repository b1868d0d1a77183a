-- The database records each act itself, with the role of the session, so that every act has a row. Command line and
-- dashboard pass the person and the parameters of the act in settings of the transaction.
CREATE FUNCTION pgoutbox._record_act(
    action text,
    message_ids bigint[] DEFAULT NULL,
    message_count integer DEFAULT NULL,
    queue text DEFAULT NULL,
    details jsonb DEFAULT NULL
)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
INSERT INTO pgoutbox.audit (act_id, actor, origin, action, queue, message_count, message_ids, details)
SELECT
    coalesce(nullif(current_setting('pgoutbox.act_id', true), '')::uuid, gen_random_uuid()),
    coalesce(nullif(current_setting('pgoutbox.act_actor', true), ''), session_user),
    nullif(current_setting('pgoutbox.act_origin', true), ''),
    _record_act.action,
    _record_act.queue,
    coalesce(cardinality(_record_act.message_ids), _record_act.message_count),
    _record_act.message_ids,
    coalesce(nullif(current_setting('pgoutbox.act_details', true), '')::jsonb, _record_act.details)
WHERE coalesce(cardinality(_record_act.message_ids), _record_act.message_count, 1) > 0
$function$;

COMMENT ON FUNCTION pgoutbox._record_act IS
    'Add a row to the audit, with the actor of the transaction, or else the role of the session.';
