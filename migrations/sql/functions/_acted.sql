-- Record an act on the changed messages, of the chosen ones, wake the workers of their queues, and return the results.
-- `done` is the result for a message that is changed. One that was to be changed and is not counts as locked: a trigger of
-- the user may have refused the change.
CREATE FUNCTION pgoutbox._acted(
    action text,
    done text,
    chosen pgoutbox.act_result[],
    changed bigint[],
    details jsonb DEFAULT NULL,
    records boolean DEFAULT true,
    wakes boolean DEFAULT true
)
RETURNS SETOF pgoutbox.act_result
LANGUAGE plpgsql
AS $function$
BEGIN
    IF wakes THEN
        PERFORM pgoutbox._wake_all_workers(q.queue)
        FROM (SELECT DISTINCT m.queue FROM pgoutbox.message AS m WHERE m.id = ANY (changed)) AS q;
    END IF;
    IF records THEN
        PERFORM pgoutbox._record_act(action, message_ids => coalesce(changed, '{}'), details => details);
    END IF;
    RETURN QUERY
    SELECT c.id, coalesce(c.result, CASE WHEN c.id = ANY (changed) THEN done ELSE 'locked' END), c.state, c.other_id
    FROM unnest(chosen) AS c;
END
$function$;
