-- Whether each statement of the transaction sees what others have committed until then. PostgreSQL treats READ
-- UNCOMMITTED like READ COMMITTED.
CREATE FUNCTION pgoutbox._reads_committed()
RETURNS boolean
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
END
$function$;
