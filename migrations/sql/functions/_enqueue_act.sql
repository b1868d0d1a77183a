-- _enqueue_receipt as an act of an operator: the audit records the topic, the id and a digest of the destination, not
-- the payload. Refused with a destination during a blackout. Operators have no right to call `enqueue`, which records
-- nothing. A found duplicate is not an act. So for them it does not depend on the payload: otherwise an operator could
-- guess one, without a trace.
CREATE FUNCTION pgoutbox._enqueue_act(topic text, payload jsonb, options pgoutbox.draft, notify boolean)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    receipt bigint;
BEGIN
    IF options.destination IS NOT NULL THEN
        PERFORM pgoutbox._require_plain_destination('enqueue', options.destination);
    END IF;
    IF options.dedupe_key IS NOT NULL AND NOT pg_has_role(session_user, current_user, 'MEMBER') THEN
        options.on_duplicate := 'ignore';
    END IF;
    receipt := pgoutbox._enqueue_receipt(topic, payload, options, notify);
    IF receipt > 0 THEN
        PERFORM pgoutbox._record_act(
            'enqueue',
            message_ids => ARRAY[receipt],
            details => jsonb_strip_nulls(jsonb_build_object(
                'topic', topic, 'new_destination_digest', pgoutbox.destination_digest(options.destination)
            ))
        );
    END IF;
    RETURN receipt;
END
$function$;
