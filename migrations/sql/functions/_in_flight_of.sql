-- Number of attempts of a queue in flight, counted up to at_most. This is the only such count, with its own snapshot:
-- the caller may have waited for the queue's row. Lapsed attempts do not count, or no worker could claim them again.
CREATE FUNCTION pgoutbox._in_flight_of(p_queue text, at_most integer)
RETURNS bigint
LANGUAGE plpgsql
VOLATILE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.in_flight_view AS v
            WHERE v.queue = p_queue AND v.lease_expires_at > clock_timestamp()
            LIMIT at_most
        ) AS in_flight
    );
END
$function$;
