-- Record in the audit that an operator closed a breaker. Workers also close breakers, when a probe succeeds.
CREATE FUNCTION pgoutbox._record_breaker_act()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF pgoutbox._is_act() THEN
        PERFORM pgoutbox._record_act('breaker', details => jsonb_build_object('key', OLD.key));
    END IF;
    RETURN NULL;
END
$function$;

CREATE TRIGGER breaker_acts
AFTER DELETE ON pgoutbox.breaker
FOR EACH ROW
EXECUTE FUNCTION pgoutbox._record_breaker_act();
