-- End all that a handler has left in its session: settings, locks, temporary tables, prepared statements, listening.
-- All parts of DISCARD ALL except the cached plans, which no handler can change, and which cost more than its message.
CREATE FUNCTION pgoutbox._reset_session()
RETURNS void
LANGUAGE plpgsql
AS $function$
BEGIN
    EXECUTE 'CLOSE ALL';
    PERFORM pg_catalog.pg_advisory_unlock_all();
    UNLISTEN *;
    DEALLOCATE ALL;
    DISCARD TEMP;
    DISCARD SEQUENCES;
    SET SESSION AUTHORIZATION DEFAULT;
    RESET ALL;
END
$function$;
