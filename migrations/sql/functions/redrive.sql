-- Make failed and cancelled messages pending again, if they are in one of the states and, if given, at these attempts:
-- redriven, missing, wrong_state, changed, superseded, dedupe_key_taken or locked.
CREATE FUNCTION pgoutbox.redrive(
    ids bigint[], states text[] DEFAULT '{failed,cancelled}', attempt_counts integer[] DEFAULT NULL
)
RETURNS SETOF pgoutbox.act_result
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    chosen constant pgoutbox.act_result[] := pgoutbox._take_back_keys(pgoutbox._choose(
        ids,
        ARRAY(SELECT s.state FROM unnest(states) AS s(state) WHERE s.state IN ('failed', 'cancelled')),
        attempt_counts,
        only_newest => true
    ));
    redriven bigint[];
BEGIN
    WITH written AS (
        UPDATE pgoutbox.message AS m
        SET state = 'pending',
            available_at = now(),
            finished_at = NULL,
            lane = CASE WHEN m.fair_key IS NULL THEN least(m.attempt_count, 1) ELSE 2 END,
            max_attempts = m.attempt_count + m.attempt_budget,
            -- The time in which nobody could read its payload begins again: its next refusal is an entry of its own.
            attempts = CASE
                WHEN (m.attempts #>> '{-1,outcome}', m.attempts #>> '{-1,reason_code}') = ('snoozed', 'unreadable')
                    THEN jsonb_set(m.attempts, '{-1,outcome}', to_jsonb(m.state))
                ELSE m.attempts
            END
        FROM unnest(chosen) AS c
        WHERE m.id = c.id AND c.result IS NULL AND m.state IN ('failed', 'cancelled')
        RETURNING m.id
    )
    SELECT array_agg(w.id ORDER BY w.id) INTO redriven FROM written AS w;
    DELETE FROM pgoutbox.cancel_request AS c WHERE c.message_id = ANY (redriven);
    RETURN QUERY SELECT * FROM pgoutbox._acted('redrive', 'redriven', chosen, redriven);
END
$function$;
