-- Delete the requests to cancel messages that have ended and the rates of fair keys that rest, and let later enqueues
-- refuse the ids that are drawn until now. A redrive deletes requests too, in another order: this waits for none of its locks.
CREATE FUNCTION pgoutbox._forget_requests()
RETURNS void
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DELETE FROM pgoutbox.cancel_request AS c
WHERE c.ctid = ANY (ARRAY(
    SELECT r.ctid
    FROM pgoutbox.cancel_request AS r
    WHERE NOT EXISTS (
        SELECT FROM pgoutbox.message_live AS m WHERE m.id = r.message_id AND m.created_at = r.message_created_at
    )
    FOR UPDATE OF r SKIP LOCKED
));
-- Turns and acts lock the row of the queue before those of its keys: this waits for none of these.
DELETE FROM pgoutbox.fair_share AS s
WHERE s.ctid = ANY (ARRAY(
    SELECT r.ctid
    FROM pgoutbox.fair_share AS r
    WHERE r.fair_key <> '' AND r.spent_at <= now() AND num_nonnulls(r.weight, r.max_in_flight, r.rate_count) = 0
    FOR UPDATE OF r SKIP LOCKED
));
UPDATE pgoutbox.id_floor AS f
SET newest_id = greatest(f.newest_id, (SELECT s.last_value FROM pgoutbox.message_id_seq AS s WHERE s.is_called))
$function$;
