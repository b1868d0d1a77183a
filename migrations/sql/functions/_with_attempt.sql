-- A breaker that is open for a day postpones a message a hundred times: attempts that were postponed alike are one entry.
-- The history is bounded, because each retry writes it again.
CREATE FUNCTION pgoutbox._with_attempt(attempts pgoutbox.attempt[], added pgoutbox.attempt)
RETURNS pgoutbox.attempt[]
LANGUAGE plpgsql
IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    last constant pgoutbox.attempt := attempts[cardinality(attempts)];
BEGIN
    added.times := 1;
    added.error := left(added.error, 1000);
    IF added.outcome IN ('snoozed', 'released')
        AND (last.outcome, last.error, last.reason_code, last.breaker_key)
            IS NOT DISTINCT FROM (added.outcome, added.error, added.reason_code, added.breaker_key)
    THEN
        added.times := last.times + 1;
        added.started_at := last.started_at;
        attempts[cardinality(attempts)] := added;
        RETURN attempts;
    END IF;
    RETURN (attempts || added)[greatest(1, cardinality(attempts) - 18):];
END
$function$;

COMMENT ON FUNCTION pgoutbox._with_attempt IS
    'The history of a message with one more attempt. It keeps the newest 20 entries; attempts that were postponed alike '
    'share one.';
