-- Operators have no right to call `enqueue`, which records nothing. A found duplicate is not an act. So for them it does
-- not depend on the payload: otherwise an operator could guess one, without a trace.
CREATE FUNCTION pgoutbox._enqueue_act(
    topic text,
    payload jsonb,
    queue text,
    destination text,
    coalesce_key text,
    dedupe_key text,
    available_at timestamptz,
    expires_at timestamptz,
    headers jsonb,
    max_attempts integer,
    ordering_key text,
    on_failed text,
    max_delay interval,
    owner text,
    on_duplicate text,
    notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    receipt constant bigint := pgoutbox._enqueue_receipt(
        topic => _enqueue_act.topic,
        payload => _enqueue_act.payload,
        queue => _enqueue_act.queue,
        destination => _enqueue_act.destination,
        coalesce_key => _enqueue_act.coalesce_key,
        dedupe_key => _enqueue_act.dedupe_key,
        available_at => _enqueue_act.available_at,
        expires_at => _enqueue_act.expires_at,
        headers => _enqueue_act.headers,
        max_attempts => _enqueue_act.max_attempts,
        ordering_key => _enqueue_act.ordering_key,
        on_failed => _enqueue_act.on_failed,
        max_delay => _enqueue_act.max_delay,
        owner => _enqueue_act.owner,
        on_duplicate => CASE
            WHEN _enqueue_act.dedupe_key IS NULL OR pg_has_role(session_user, current_user, 'MEMBER')
                THEN _enqueue_act.on_duplicate
            ELSE 'ignore'
        END,
        notify => _enqueue_act.notify
    );
BEGIN
    IF _enqueue_act.destination IS NOT NULL THEN
        PERFORM pgoutbox._refuse_in_blackout('enqueue: destination');
    END IF;
    IF receipt > 0 THEN
        PERFORM pgoutbox._record_act(
            'enqueue',
            message_ids => ARRAY[receipt],
            details => jsonb_strip_nulls(jsonb_build_object(
                'topic', topic, 'new_destination_digest', pgoutbox.destination_digest(_enqueue_act.destination)
            ))
        );
    END IF;
    RETURN receipt;
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue_act IS
    '_enqueue_receipt as an act of an operator: the audit records the topic, the id and a digest of the '
    'destination, not the payload. Refused with a destination during a blackout.';
