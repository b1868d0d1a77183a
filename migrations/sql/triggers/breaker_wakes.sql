-- The messages behind a breaker can be claimed when it closes, by all workers at once.
CREATE FUNCTION pgoutbox._wake_held_queues()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $function$
BEGIN
    PERFORM pgoutbox._wake_all_workers(q.queue)
    FROM (SELECT DISTINCT split_part(h.hold, ' ', 1) AS queue FROM unnest(OLD.holds) AS h(hold)) AS q;
    RETURN NULL;
END
$function$;

COMMENT ON FUNCTION pgoutbox._wake_held_queues IS
    'Make the workers of the queues behind a breaker search all due messages when it has closed.';

CREATE TRIGGER breaker_wakes
AFTER DELETE ON pgoutbox.breaker
FOR EACH ROW
WHEN (OLD.holds <> '{}')
EXECUTE FUNCTION pgoutbox._wake_held_queues();
