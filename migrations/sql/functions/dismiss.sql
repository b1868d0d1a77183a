-- End failed messages as skipped, with a reason, because nobody will deliver them: dismissed, missing, wrong_state,
-- changed or locked.
--
-- The messages behind a failed one that halts its ordering key may follow now.
CREATE FUNCTION pgoutbox.dismiss(ids bigint[], reason text, attempt_counts integer[] DEFAULT NULL)
RETURNS SETOF pgoutbox.act_result
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    actor constant text := coalesce(pgoutbox._announced() ->> 'actor', session_user);
    chosen pgoutbox.act_result[];
    dismissed bigint[];
    has_halted boolean;
BEGIN
    PERFORM pgoutbox._require_reason('dismiss', reason);
    chosen := pgoutbox._choose(ids, '{failed}', attempt_counts);
    WITH written AS (
        UPDATE pgoutbox.message AS m
        SET state = 'skipped',
            finished_at = clock_timestamp(),
            skip_reason = 'dismissed by ' || actor || ': ' || reason
        FROM unnest(chosen) AS c
        WHERE m.id = c.id AND c.result IS NULL AND m.state = 'failed'
        RETURNING m.id, m.halts_key
    )
    SELECT array_agg(w.id ORDER BY w.id), bool_or(w.halts_key) INTO dismissed, has_halted FROM written AS w;
    RETURN QUERY SELECT * FROM pgoutbox._acted(
        'dismiss', 'dismissed', chosen, dismissed, jsonb_build_object('reason', reason), wakes => has_halted
    );
END
$function$;
