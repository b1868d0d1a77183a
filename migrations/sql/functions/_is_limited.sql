CREATE FUNCTION pgoutbox._is_limited(p_queue text)
RETURNS boolean
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM pgoutbox.queue AS q
        WHERE q.name = p_queue AND num_nonnulls(q.paused_at, q.rate_count, q.max_in_flight) > 0
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox._is_limited IS 'Whether a queue is paused or has limits, so that claims need permits.';
