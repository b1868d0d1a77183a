-- End all that a handler has left in its session: settings, locks, temporary tables, prepared statements, listening.
-- All parts of DISCARD ALL except one: no handler can change the cached plans, and to make them again takes longer than
-- the message. A search_path of the function would come back after RESET ALL, so all names are qualified.
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
