-- Give a pending message of this owner another payload, with it another destination, or another due time: edited,
-- missing (or of another owner), wrong_state, attempted (an attempt had begun, so only the due time can be changed),
-- superseded, expires (before its due time), encrypted (the new payload is not, or it is sealed for another destination
-- than sealed_for), shared (it has the shared content of a fan-out) or locked (try again). A new destination removes
-- the headers.
--
-- A producer must not read by an edit what others wrote. So a new destination needs a new payload, takes the headers away,
-- and is not set on a message with a shared content. Only a message that was never claimed gets another payload: an
-- attempt that has begun may hand the old one over, whatever became of it. A message of another owner counts as missing.
CREATE FUNCTION pgoutbox.edit(
    message_id bigint,
    owner text,
    payload jsonb DEFAULT NULL,
    destination text DEFAULT NULL,
    available_at timestamptz DEFAULT NULL,
    sealed_for text DEFAULT NULL,
    payload_version integer DEFAULT NULL
)
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    problem constant text := CASE
        WHEN edit.message_id IS NULL THEN 'message_id: must not be null'
        WHEN edit.owner IS NULL THEN 'owner: must not be null'
        WHEN edit.payload IS NULL AND edit.destination IS NOT NULL
            THEN 'destination: must not be given without a new payload'
        WHEN edit.payload IS NULL AND edit.payload_version IS NOT NULL
            THEN 'payload_version: must not be given without a new payload'
        WHEN edit.payload IS NULL AND edit.available_at IS NULL
            THEN 'payload: must not be null; give a payload, a due time, or both'
        ELSE pgoutbox._draft_error(pgoutbox._draft(
            'a',
            coalesce(edit.payload, '1'),
            jsonb_strip_nulls(jsonb_build_object(
                'destination', edit.destination,
                'available_at', edit.available_at,
                'payload_version', edit.payload_version
            ))
        ))
    END;
    is_sealed constant boolean := edit.payload -> 'pgoutbox.encrypted' IS NOT NULL;
    chosen pgoutbox.act_result[];
    edited bigint[];
BEGIN
    PERFORM pgoutbox._raise_argument_error(problem, in_function => 'edit');
    -- The lock is held until the change. A claim that has read the old row finds another row in its place.
    chosen := pgoutbox._choose(
        ARRAY(
            SELECT m.id FROM pgoutbox.message AS m
            WHERE m.id = edit.message_id AND m.owner = edit.owner AND m.failure_of IS NULL
        ),
        '{pending}',
        only_newest => true,
        due_at => greatest(edit.available_at, now())
    );
    chosen := ARRAY(
        SELECT ROW(
            c.id,
            coalesce(
                c.result,
                CASE
                    WHEN edit.payload IS NULL THEN NULL
                    WHEN m.attempt_count > 0 THEN 'attempted'
                    WHEN m.content_id IS NOT NULL THEN 'shared'
                    WHEN NOT is_sealed AND m.payload -> 'pgoutbox.encrypted' IS NOT NULL THEN 'encrypted'
                    -- An encrypted payload is bound to its destination.
                    WHEN is_sealed AND coalesce(edit.destination, m.destination) IS DISTINCT FROM edit.sealed_for
                        THEN 'encrypted'
                END
            ),
            c.state,
            c.other_id
        )::pgoutbox.act_result
        FROM unnest(chosen) AS c
        LEFT JOIN pgoutbox.message_live AS m ON m.id = c.id
    );
    WITH written AS (
        UPDATE pgoutbox.message_live AS m
        SET payload = coalesce(edit.payload, m.payload),
            payload_version = CASE
                WHEN edit.payload IS NULL THEN m.payload_version ELSE coalesce(edit.payload_version, m.payload_version)
            END,
            destination = coalesce(edit.destination, m.destination),
            headers = CASE
                WHEN coalesce(edit.destination, m.destination) IS DISTINCT FROM m.destination THEN NULL ELSE m.headers
            END,
            lane = CASE WHEN m.fair_key IS NULL THEN m.lane ELSE 2 END,
            available_at = CASE
                WHEN edit.available_at IS NULL THEN m.available_at ELSE greatest(edit.available_at, now())
            END
        FROM unnest(chosen) AS c
        WHERE m.id = c.id AND c.result IS NULL AND m.state = 'pending'
        RETURNING m.id
    )
    SELECT array_agg(w.id) INTO edited FROM written AS w;
    RETURN coalesce(
        (SELECT a.result FROM pgoutbox._acted('edit', 'edited', chosen, edited, records => false) AS a), 'missing'
    );
END
$function$;
