-- Enqueue the messages of a schedule for these times, and write its next time; null: none is left. Returns the ids, or null
-- if the schedule was changed since its revision and next time were read, such as by another worker.
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
    ids bigint[];
BEGIN
    UPDATE pgoutbox.schedule AS s
    SET next_at = _tick_schedule.next_at,
        ended_at = CASE WHEN _tick_schedule.next_at IS NULL THEN now() END,
        last_at = coalesce((SELECT max(t) FROM unnest(times) AS t), s.last_at)
    WHERE s.name = _tick_schedule.name
        AND s.revision = _tick_schedule.revision
        AND s.next_at IS NOT DISTINCT FROM known_next_at
        AND s.paused_at IS NULL
        AND s.ended_at IS NULL
    RETURNING * INTO found;
    IF found.name IS NULL THEN
        RETURN NULL;
    END IF;
    ids := ARRAY(
        SELECT e.id
        FROM pgoutbox.enqueue_many((
            SELECT coalesce(jsonb_agg(found.message || jsonb_build_object(
                'dedupe_key', format('schedule %s %s', found.name, to_char(t, 'YYYY-MM-DD"T"HH24:MI:SS"Z"')),
                'on_duplicate', 'ignore',
                -- The part of the jitter is the same each time, so that the distance of two messages is that of their times.
                'available_at', t + found.jitter * ((hashtext(found.name)::bigint + 2147483648) / 4294967296.0),
                'headers', coalesce(nullif(found.message -> 'headers', 'null'), '{}') || jsonb_build_object(
                    'schedule', found.name, 'scheduled-for', to_char(t, 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
                )
            ) ORDER BY t), '[]')
            FROM unnest(times) AS t
        )) AS e
        ORDER BY e.item_index
    );
    IF cardinality(ids) > 0 THEN
        UPDATE pgoutbox.schedule AS s SET last_message_id = ids[cardinality(ids)] WHERE s.name = found.name;
    END IF;
    RETURN ids;
END
$function$;
