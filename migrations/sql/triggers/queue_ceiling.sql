-- Refuse a rate above the ceiling of the queue. A new ceiling lowers it. Set the tokens of the bucket. The default burst,
-- the ceiling and the tokens of a queue follow from its limits. Operators may not write tokens, nor the number of
-- attempts, which keeps the ceiling.
CREATE FUNCTION pgoutbox._check_limits()
RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    has_low_rate constant boolean :=
        (NEW.rate_count * NEW.ceiling_seconds <= NEW.ceiling_count * NEW.rate_seconds) IS TRUE;
    is_new constant boolean := (NEW.ceiling_count, NEW.ceiling_seconds)
        IS DISTINCT FROM (OLD.ceiling_count, OLD.ceiling_seconds);
BEGIN
    IF NEW.ceiling_count IS NOT NULL AND NOT has_low_rate THEN
        IF NOT is_new THEN
            RAISE check_violation USING
                MESSAGE = format(
                    'rate %s: the ceiling of queue %s is %s in %s s, which the owner of the schema has set',
                    coalesce(NEW.rate_count || ' in ' || NEW.rate_seconds || ' s', 'none'),
                    NEW.name, NEW.ceiling_count, NEW.ceiling_seconds
                ),
                HINT = 'Set a lower value, or ask the owner to run: pgoutbox limit ' || NEW.name || ' --at-most RATE',
                SCHEMA = 'pgoutbox',
                TABLE = 'queue',
                CONSTRAINT = 'queue_ceiling';
        END IF;
        -- A new ceiling lowers the current limit.
        NEW.rate_count := NEW.ceiling_count;
        NEW.rate_seconds := NEW.ceiling_seconds;
        NEW.burst := least(NEW.burst, 5, greatest(1, NEW.rate_count / 10));
    END IF;
    IF NEW.rate_count IS NOT NULL THEN
        -- Workers look for permits a few times a second: of a smaller bucket, they would find a part of the rate only.
        NEW.burst := greatest(
            coalesce(NEW.burst, least(5, greatest(1, NEW.rate_count / 10))),
            ceil(least(NEW.rate_count, NEW.rate_count / nullif(NEW.rate_seconds, 0)))::integer
        );
    END IF;
    IF NEW.rate_count IS NULL THEN
        NEW.tokens := NULL;
        NEW.tokens_at := NULL;
    ELSIF OLD.rate_count IS NOT NULL THEN
        -- A changed rate keeps the tokens of the bucket, up to the new burst.
        NEW.tokens := least(NEW.burst, pgoutbox._bucket_of(OLD, clock_timestamp()));
        NEW.tokens_at := greatest(clock_timestamp(), OLD.tokens_at);
    ELSE
        -- A new bucket is full.
        NEW.tokens := coalesce(NEW.tokens, NEW.burst);
        NEW.tokens_at := coalesce(NEW.tokens_at, clock_timestamp());
    END IF;
    RETURN NEW;
END
$function$;

-- Claims write only tokens, which does not fire this trigger.
CREATE TRIGGER queue_ceiling
BEFORE INSERT OR UPDATE OF rate_count, rate_seconds, burst, ceiling_count, ceiling_seconds ON pgoutbox.queue
FOR EACH ROW
EXECUTE FUNCTION pgoutbox._check_limits();
