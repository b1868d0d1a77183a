-- The history of a message with one more attempt. It keeps 20 entries, the first one and the newest, because each retry
-- writes it again. Attempts that were postponed alike share one: a breaker that is open for a day postpones a message a
-- hundred times.
CREATE FUNCTION pgoutbox._with_attempt(attempts jsonb, added pgoutbox.attempt)
RETURNS jsonb
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    last constant jsonb := attempts -> -1;
BEGIN
    added.error := left(added.error, 1000);
    IF added.outcome IN ('snoozed', 'released')
        AND (last ->> 'outcome', last ->> 'reason_code', last ->> 'breaker_key')
            IS NOT DISTINCT FROM (added.outcome, added.reason_code, added.breaker_key)
        -- Each version of a model has its own error. Together they last as long as nobody can read the payload.
        AND (added.reason_code = 'unreadable' OR last ->> 'error' IS NOT DISTINCT FROM added.error)
    THEN
        added.times := (last ->> 'times')::integer + 1;
        added.started_at := last ->> 'started_at';
        attempts := attempts - -1;
    ELSIF jsonb_array_length(attempts) = 20 THEN
        attempts := attempts - 1; -- The first one tells for how long the message has been undelivered.
    END IF;
    RETURN coalesce(attempts, '[]') || jsonb_strip_nulls(to_jsonb(added));
END
$function$;
