-- Let pending messages wait for at least so long, for a reason: snoozed, missing, wrong_state, changed, superseded,
-- expires (before that) or locked.
CREATE FUNCTION pgoutbox.snooze(ids bigint[], duration interval, reason text, attempt_counts integer[] DEFAULT NULL)
RETURNS SETOF pgoutbox.act_result
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC' -- The details of the act do not depend on the session.
AS $function$
DECLARE
    -- As in enqueue, an interval is a number of seconds.
    seconds constant float8 := extract(epoch FROM duration);
    due_at timestamptz;
    chosen pgoutbox.act_result[];
    snoozed bigint[];
BEGIN
    PERFORM pgoutbox._require_reason('snooze', reason);
    PERFORM pgoutbox._raise_argument_error('duration: must be from 1 second to 3650 days', in_function => 'snooze')
    WHERE (seconds BETWEEN 1 AND 315360000) IS NOT TRUE;
    due_at := clock_timestamp() + make_interval(secs => seconds); -- The transaction may be old.
    chosen := pgoutbox._choose(ids, '{pending}', attempt_counts, only_newest => true, due_at => due_at);
    WITH written AS (
        UPDATE pgoutbox.message_live AS m
        SET available_at = greatest(m.available_at, due_at),
            lane = CASE WHEN m.fair_key IS NULL THEN m.lane ELSE 2 END
        FROM unnest(chosen) AS c
        WHERE m.id = c.id AND c.result IS NULL AND m.state = 'pending'
        RETURNING m.id
    )
    SELECT array_agg(w.id ORDER BY w.id) INTO snoozed FROM written AS w;
    RETURN QUERY SELECT * FROM pgoutbox._acted(
        'snooze', 'snoozed', chosen, snoozed, jsonb_build_object('available_at', due_at, 'reason', reason), wakes => false
    );
END
$function$;
