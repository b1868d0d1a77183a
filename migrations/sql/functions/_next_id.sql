-- The next id of a key with this newest id. Raises 55000 if it is not greater: a sequence that was set back, was not
-- restored with the data, or hands out ids from sessions' caches would reverse newest-wins and the order of a key.
CREATE FUNCTION pgoutbox._next_id(newest_id bigint)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
DECLARE
    new_id constant bigint := nextval('pgoutbox.message_id_seq');
BEGIN
    IF new_id <= newest_id THEN
        PERFORM pgoutbox._refuse_id(new_id);
    END IF;
    RETURN new_id;
END
$function$;
