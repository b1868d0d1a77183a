-- Its caller can read the messages at the new destination. So it is a right of its own, which the owner can revoke.
CREATE FUNCTION pgoutbox.redrive_to(
    ids bigint[],
    destination text,
    states text[] DEFAULT '{failed,cancelled}',
    attempt_counts integer[] DEFAULT NULL
)
RETURNS TABLE (
    id bigint, redriven boolean, state text, superseded_by bigint, attempt_count integer, dedupe_key_of bigint,
    is_bound boolean
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $function$
DECLARE
    problem constant text := CASE
        WHEN redrive_to.destination IS NULL THEN 'destination: must not be null'
        ELSE pgoutbox._draft_error(
            pgoutbox._draft('a', '1', jsonb_build_object('destination', redrive_to.destination))
        )
    END;
BEGIN
    IF problem IS NOT NULL THEN
        PERFORM pgoutbox._raise_argument_error(problem);
    END IF;
    PERFORM pgoutbox._refuse_in_blackout('redrive_to: destination');
    RETURN QUERY
    SELECT r.*
    FROM pgoutbox._redrive(redrive_to.ids, redrive_to.states, redrive_to.attempt_counts, redrive_to.destination) AS r;
END
$function$;

COMMENT ON FUNCTION pgoutbox.redrive_to IS
    'redrive to another destination. The audit records digests of the old and of the new one. Refused during a blackout. '
    'Returns also whether a message was left alone because its payload is encrypted for its destination.';
