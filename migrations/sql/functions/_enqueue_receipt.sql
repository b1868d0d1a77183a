-- enqueue with its options as JSON. The id is negative if the message already existed. Its callers need no privilege on
-- any table: it runs with the owner's privileges. The plain case is here, because another function would cost as much
-- again.
CREATE FUNCTION pgoutbox._enqueue_receipt(topic text, payload jsonb, options jsonb, notify boolean)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    new_id bigint;
BEGIN
    IF options IS NULL
        AND topic ~ '^[a-z][a-z0-9_.-]*$'
        AND length(topic) <= 63
        AND pg_column_size(payload) <= 65536
    THEN
        -- The id is drawn after the snapshot of the statement, so maintenance cannot have raised the floor above it meanwhile.
        INSERT INTO pgoutbox.message_live AS m (id, topic, payload)
        SELECT CASE WHEN n <= (SELECT f.newest_id FROM pgoutbox.id_floor AS f) THEN pgoutbox._refuse_id(n) ELSE n END,
            _enqueue_receipt.topic, _enqueue_receipt.payload
        FROM (SELECT nextval('pgoutbox.message_id_seq') OFFSET 0) AS drawn(n)
        RETURNING m.id INTO new_id;
        IF notify IS NOT FALSE THEN
            PERFORM pgoutbox._notify_workers('default');
        END IF;
        RETURN new_id;
    END IF;
    RETURN (pgoutbox._enqueue(ARRAY[pgoutbox._draft(topic, payload, options)], notify))[1];
END
$function$;
