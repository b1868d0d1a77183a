-- Return the version of this schema. Raise OB004 for a package that is too old for it. Every session of a worker, a command
-- or a dashboard begins with this call, and each report of a worker, once a minute.
CREATE FUNCTION pgoutbox._require_package(package text)
RETURNS integer
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    newest record;
BEGIN
    -- A later revision that needs less lifts no bar.
    SELECT max(r.number) OVER () AS number, r.lowest_package
    INTO newest
    FROM pgoutbox.revision AS r
    ORDER BY pgoutbox._release_of(r.lowest_package) DESC
    LIMIT 1;
    IF pgoutbox._release_of(_require_package.package) < pgoutbox._release_of(newest.lowest_package) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'OB004',
            MESSAGE = format(
                'the schema pgoutbox needs version %s of the package or a later one, and this is %s',
                newest.lowest_package, _require_package.package
            );
    END IF;
    RETURN coalesce(newest.number, 0);
END
$function$;
