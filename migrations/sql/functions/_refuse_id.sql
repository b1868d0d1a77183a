-- Raise 55000: the sequence has given an id that an older message has or had.
CREATE FUNCTION pgoutbox._refuse_id(used_id bigint)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'object_not_in_prerequisite_state',
        SCHEMA = 'pgoutbox',
        MESSAGE = 'pgoutbox.enqueue: sequence pgoutbox.message_id_seq is behind the messages: it gave ' || used_id
            || ', which was used before; run: ALTER SEQUENCE pgoutbox.message_id_seq CACHE 1; '
            'SELECT setval(''pgoutbox.message_id_seq'', greatest((SELECT max(id) FROM pgoutbox.message), '
            '(SELECT max(newest_id) FROM pgoutbox.key_head), (SELECT newest_id FROM pgoutbox.id_floor))); '
            'and reconnect';
END
$function$;
