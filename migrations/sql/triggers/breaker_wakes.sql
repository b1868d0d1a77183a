-- Make the workers of the queues behind a breaker search all due messages when it has closed or a hold has ended. The
-- messages of a hold can be claimed when it ends, by all workers at once: because the breaker closes, or because a
-- probe found none or took another way. Claims before that have left out those that were committed meanwhile.
CREATE FUNCTION pgoutbox._wake_held_queues()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM pgoutbox._wake_all_workers(q.queue)
    FROM (
        SELECT DISTINCT split_part(ended.hold, ' ', 1) AS queue
        -- A deleted row has no NEW.
        FROM (SELECT unnest(OLD.holds) EXCEPT SELECT unnest(NEW.holds)) AS ended(hold)
    ) AS q;
    RETURN NULL;
END
$function$;

CREATE TRIGGER breaker_wakes
AFTER DELETE OR UPDATE OF holds ON pgoutbox.breaker
FOR EACH ROW
WHEN (OLD.holds <> '{}')
EXECUTE FUNCTION pgoutbox._wake_held_queues();
