-- Make pending messages due at a time, or at once: rescheduled, missing, wrong_state, superseded, expires (before that
-- time) or locked.
CREATE FUNCTION pgoutbox.reschedule(ids bigint[], available_at timestamptz DEFAULT NULL)
RETURNS SETOF pgoutbox.act_result
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC' -- The details of the act do not depend on the session.
AS $function$
DECLARE
    due_at constant timestamptz := greatest(reschedule.available_at, now());
    chosen pgoutbox.act_result[];
    rescheduled bigint[];
BEGIN
    PERFORM pgoutbox._raise_argument_error(
        'available_at: must be finite and not more than 10 years ahead', in_function => 'reschedule'
    )
    WHERE NOT isfinite(reschedule.available_at) OR reschedule.available_at > now() + interval '10 years';
    chosen := pgoutbox._choose(ids, '{pending}', only_newest => true, due_at => due_at);
    WITH written AS (
        UPDATE pgoutbox.message_live AS m
        SET available_at = due_at,
            lane = CASE WHEN m.fair_key IS NULL THEN m.lane ELSE 2 END
        FROM unnest(chosen) AS c
        WHERE m.id = c.id AND c.result IS NULL AND m.state = 'pending'
        RETURNING m.id
    )
    SELECT array_agg(w.id ORDER BY w.id) INTO rescheduled FROM written AS w;
    RETURN QUERY SELECT * FROM pgoutbox._acted(
        'reschedule', 'rescheduled', chosen, rescheduled, jsonb_build_object('available_at', due_at),
        records => pgoutbox._is_act()
    );
END
$function$;
