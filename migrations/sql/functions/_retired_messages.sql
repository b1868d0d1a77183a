-- A detached partition keeps its rows until its attempts and keys are deleted, but message_done no longer shows them.
-- The lock keeps the tables from being dropped meanwhile.
CREATE FUNCTION pgoutbox._retired_messages(
    ids bigint[] DEFAULT NULL,
    owner text DEFAULT NULL,
    destinations text[] DEFAULT NULL,
    failures_of bigint[] DEFAULT NULL
)
RETURNS SETOF pgoutbox.message
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    part text;
BEGIN
    LOCK TABLE pgoutbox.retired IN SHARE MODE;
    FOR part IN SELECT r.name FROM pgoutbox.retired AS r ORDER BY r.name LOOP
        RETURN QUERY EXECUTE 'SELECT m.* FROM pgoutbox.' || quote_ident(part) || ' AS m '
            || 'WHERE m.id = ANY ($1) OR m.owner = $2 OR m.destination = ANY ($3) OR m.failure_of = ANY ($4) '
            || 'OR pgoutbox._is_failure_to($3, m.failure_of, m.id, m.payload)'
            USING ids, owner, destinations, failures_of;
    END LOOP;
END
$function$;

COMMENT ON FUNCTION pgoutbox._retired_messages IS
    'The messages of retired partitions with one of these ids, of this owner, or to one of these destinations, and those '
    'for hooks about failed messages to these destinations, or with the ids failures_of.';
