-- The next id of a key, greater than its newest id. A sequence that was set back, was not restored with the data, or
-- hands out ids from sessions' caches would reverse newest-wins and the order of a key.
CREATE FUNCTION pgoutbox._next_id(newest_id bigint)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
DECLARE
    new_id constant bigint := nextval('pgoutbox.message_id_seq');
BEGIN
    IF new_id <= newest_id THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            SCHEMA = 'pgoutbox',
            MESSAGE = 'pgoutbox.enqueue: sequence pgoutbox.message_id_seq is behind the messages: it gave ' || new_id
                || ', and the newest message of this key is ' || newest_id || '; run: ALTER SEQUENCE '
                'pgoutbox.message_id_seq CACHE 1; SELECT setval(''pgoutbox.message_id_seq'', greatest('
                '(SELECT max(id) FROM pgoutbox.message), (SELECT max(newest_id) FROM pgoutbox.key_head))); '
                'and reconnect';
    END IF;
    RETURN new_id;
END
$function$;

COMMENT ON FUNCTION pgoutbox._next_id IS 'The next id of a key with this newest id. Raises 55000 if it is not greater.';
