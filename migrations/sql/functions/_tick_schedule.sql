-- Enqueue the messages of a schedule for these times, and write its next time; null: none is left. Returns the ids, or null
-- if the schedule is locked, or was changed since its revision and next time were read, such as by another worker.
CREATE FUNCTION pgoutbox._tick_schedule(
    name text, revision integer, known_next_at timestamptz, times timestamptz[], next_at timestamptz
)
RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC' -- The text of a time is a part of the dedupe key.
AS $function$
#variable_conflict use_column
DECLARE
    found pgoutbox.schedule;
    due_at timestamptz;
    time_text text;
    message_id bigint;
    ids bigint[] := '{}';
BEGIN
    SELECT s.* INTO found
    FROM pgoutbox.schedule AS s
    WHERE s.name = _tick_schedule.name
        AND s.revision = _tick_schedule.revision
        AND s.next_at IS NOT DISTINCT FROM known_next_at
        AND s.paused_at IS NULL
        AND s.ended_at IS NULL
    FOR UPDATE SKIP LOCKED; -- Nor does a transaction that changes it for long hold up the others.
    IF found.name IS NULL THEN
        RETURN NULL;
    END IF;
    -- One after the other: a hundred payloads may have more than an array can.
    FOREACH due_at IN ARRAY times LOOP
        time_text := to_char(due_at, 'YYYY-MM-DD"T"HH24:MI:SS"Z"');
        SELECT e.id INTO message_id
        FROM pgoutbox.enqueue_many(jsonb_build_array(found.message - 'delay' || jsonb_build_object(
            'dedupe_key', format('schedule %s %s', found.name, time_text),
            'on_duplicate', 'ignore',
            -- The part of the jitter is the same each time, so that the distance of two messages is that of their times.
            'available_at', due_at
                + coalesce((found.message ->> 'delay')::interval, '0')
                + found.jitter * ((hashtext(found.name)::bigint + 2147483648) / 4294967296.0),
            'headers', coalesce(nullif(found.message -> 'headers', 'null'), '{}')
                || jsonb_build_object('schedule', found.name, 'scheduled-for', time_text)
        ))) AS e;
        ids := ids || message_id;
    END LOOP;
    UPDATE pgoutbox.schedule AS s
    SET next_at = _tick_schedule.next_at,
        ended_at = CASE WHEN _tick_schedule.next_at IS NULL THEN now() END,
        last_at = coalesce((SELECT max(t) FROM unnest(times) AS t), s.last_at),
        last_message_id = coalesce(ids[cardinality(ids)], s.last_message_id),
        problem = NULL,
        retry_at = NULL
    WHERE s.name = found.name;
    RETURN ids;
END
$function$;
