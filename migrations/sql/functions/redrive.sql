CREATE FUNCTION pgoutbox.redrive(
    ids bigint[], states text[] DEFAULT '{failed,cancelled}', attempt_counts integer[] DEFAULT NULL
)
RETURNS TABLE (
    id bigint, redriven boolean, state text, superseded_by bigint, attempt_count integer, dedupe_key_of bigint,
    is_bound boolean
)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $function$
SELECT r.* FROM pgoutbox._redrive(redrive.ids, redrive.states, redrive.attempt_counts, NULL) AS r
$function$;

COMMENT ON FUNCTION pgoutbox.redrive IS
    'Make failed and cancelled messages pending again, if they are in one of the states and, if given, at these '
    'attempts. Returns for each message whether it was redriven, its state before, the newer message if it is '
    'superseded, its attempt count, and the message that has its dedupe key.';
