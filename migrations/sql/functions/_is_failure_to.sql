-- Whether this is the message for a hook about a failed message to one of these destinations. The failed message may
-- have been deleted, so its destination is read from the copy.
CREATE FUNCTION pgoutbox._is_failure_to(
    destinations text[], failure_of bigint, payload jsonb
)
RETURNS boolean
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT CASE
    WHEN destinations IS NOT NULL AND failure_of IS NOT NULL
        THEN coalesce(payload ->> 'destination' = ANY (destinations), false)
    ELSE false
END
$function$;
