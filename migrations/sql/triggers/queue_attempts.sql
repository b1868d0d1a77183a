-- Record a claim of a queue with a rate, and forget older ones. Each claim inserts one row and deletes at most two, so
-- the number of rows does not grow.
CREATE FUNCTION pgoutbox._count_attempts()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO pgoutbox.rate_claim (queue, claimed_at, begun_count, attempt_count)
    VALUES (NEW.name, NEW.tokens_at, NEW.begun_count, NEW.begun_count - OLD.begun_count);
    -- An array and not a join, which old statistics would turn into a scan for each row.
    DELETE FROM pgoutbox.rate_claim AS c
    WHERE c.ctid = ANY (ARRAY(
        SELECT o.ctid
        FROM pgoutbox.rate_claim AS o
        WHERE o.queue = NEW.name
            AND o.claimed_at <= NEW.tokens_at - make_interval(secs => greatest(NEW.rate_seconds, NEW.ceiling_seconds))
        ORDER BY o.claimed_at
        LIMIT 2
    ));
    RETURN NULL;
END
$function$;

-- Only claims write this column.
CREATE TRIGGER queue_attempts
AFTER UPDATE OF begun_count ON pgoutbox.queue
FOR EACH ROW
EXECUTE FUNCTION pgoutbox._count_attempts();
