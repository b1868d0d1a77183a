-- A worker locks a row only for one statement, so a few tries are enough. All locked messages share them: another
-- cancel_all of the same owner may have locked thousands.
CREATE FUNCTION pgoutbox._cancel_unrecorded(message_ids bigint[], states text[])
RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    left_ids bigint[] := ARRAY(SELECT DISTINCT asked.id FROM unnest(message_ids) AS asked(id) ORDER BY asked.id);
    locked_ids bigint[];
    give_up_at timestamptz;
BEGIN
    IF array_position(left_ids, NULL) IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = '22004', SCHEMA = 'pgoutbox', COLUMN = 'message_id',
            MESSAGE = 'pgoutbox.cancel: message_id: must not be null';
    END IF;
    WHILE cardinality(left_ids) > 0 LOOP
        locked_ids := '{}';
        FOREACH id IN ARRAY left_ids LOOP
            result := NULL;
            BEGIN
                result := pgoutbox._try_cancel(id, states);
            EXCEPTION WHEN serialization_failure THEN
                IF NOT pgoutbox._reads_committed() THEN
                    RAISE;
                END IF;
            END;
            IF result IS NULL THEN
                locked_ids := locked_ids || id;
            ELSE
                RETURN NEXT;
            END IF;
        END LOOP;
        left_ids := locked_ids;
        give_up_at := coalesce(give_up_at, clock_timestamp() + interval '100 milliseconds');
        EXIT WHEN clock_timestamp() > give_up_at;
        PERFORM pg_sleep(0.002) WHERE cardinality(left_ids) > 0;
    END LOOP;
    result := 'locked';
    FOREACH id IN ARRAY left_ids LOOP
        RETURN NEXT;
    END LOOP;
END
$function$;

COMMENT ON FUNCTION pgoutbox._cancel_unrecorded IS 'cancel for several messages, without the audit.';
