-- Raise 23514 during a blackout. The argument is the name of a function and its argument. With another isolation level,
-- an operator could open a transaction before the owner inserts the blackout.
CREATE FUNCTION pgoutbox._refuse_in_blackout(argument text)
RETURNS void
LANGUAGE plpgsql
STABLE
AS $function$
DECLARE
    blackout constant text := (SELECT b.name FROM pgoutbox.blackout_view AS b WHERE b.is_on ORDER BY b.name LIMIT 1);
BEGIN
    IF NOT pgoutbox._reads_committed() THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_transaction_state',
            MESSAGE = 'pgoutbox.' || argument || ': refused in a transaction that may not see a new blackout',
            HINT = 'Use READ COMMITTED.';
    END IF;
    IF blackout IS NOT NULL THEN
        RAISE check_violation USING
            SCHEMA = 'pgoutbox', TABLE = 'blackout', CONSTRAINT = 'blackout',
            MESSAGE = 'pgoutbox.' || argument || ': refused within the blackout ' || blackout,
            HINT = 'Only the owner of the schema changes pgoutbox.blackout.';
    END IF;
END
$function$;
