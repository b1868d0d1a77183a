-- Record in the audit that an operator closed a breaker; workers also close breakers, when a probe succeeds. Make the
-- workers of the queues behind it search all due messages when it has closed or a hold has ended.
--
-- The messages of a hold can be claimed when it ends, by all workers at once: because the breaker closes, or because a
-- probe found none or took another way. Claims before that have left out those that were committed meanwhile.
CREATE FUNCTION pgoutbox._record_breaker_act()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF TG_OP = 'DELETE' AND pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('breaker', details => jsonb_build_object('key', OLD.key));
    END IF;
    PERFORM pgoutbox._wake_all_workers(q.queue)
    FROM (
        SELECT DISTINCT split_part(ended.hold, ' ', 1) AS queue
        -- A deleted row has no NEW.
        FROM (SELECT unnest(OLD.holds) EXCEPT SELECT unnest(NEW.holds)) AS ended(hold)
    ) AS q;
    RETURN NULL;
END
$function$;

CREATE TRIGGER breaker_acts
AFTER DELETE OR UPDATE OF holds ON pgoutbox.breaker
FOR EACH ROW
EXECUTE FUNCTION pgoutbox._record_breaker_act();
