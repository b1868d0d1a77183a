-- Its callers need no privilege on any table: it runs with the owner's privileges. The plain case is here, because
-- another function would cost as much again.
CREATE FUNCTION pgoutbox._enqueue_receipt(topic text, payload jsonb, options jsonb, notify boolean)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $function$
DECLARE
    new_id bigint;
BEGIN
    IF options IS NULL
        AND topic ~ '^[a-z][a-z0-9_.-]*$'
        AND length(topic) <= 63
        AND pg_column_size(payload) <= 65536
    THEN
        new_id := nextval('pgoutbox.message_id_seq');
        INSERT INTO pgoutbox.message_live (id, topic, payload) VALUES (new_id, topic, payload);
        IF notify IS NOT FALSE THEN
            PERFORM pgoutbox._notify_workers('default');
        END IF;
        RETURN new_id;
    END IF;
    RETURN (pgoutbox._enqueue(ARRAY[pgoutbox._draft(topic, payload, options)], notify))[1];
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue_receipt IS
    'enqueue with its options as JSON. The id is negative if the message already existed.';
