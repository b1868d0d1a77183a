-- Set the share of a fair key, or with a null key that of all keys without an own share, and wake the workers of the queue.
-- Null leaves a value as it is. If both are null, a key gets the share of its queue again, and a queue the default one. A
-- limit of 0 pauses: messages that have their turn continue. Returns false if nothing changes.
CREATE FUNCTION pgoutbox.set_fair_share(
    queue text, fair_key text DEFAULT NULL, weight integer DEFAULT NULL, max_in_flight integer DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    problem constant text := CASE
        WHEN set_fair_share.queue IS NULL THEN 'queue: must not be null'
        WHEN set_fair_share.weight NOT BETWEEN 1 AND 1000 THEN 'weight: must be from 1 to 1000'
        WHEN set_fair_share.max_in_flight NOT BETWEEN 0 AND 1000000 THEN 'max_in_flight: must be from 0 to 1000000'
        ELSE pgoutbox._draft_error(pgoutbox._draft('topic', '1', jsonb_build_object(
            'queue', set_fair_share.queue, 'fair_key', set_fair_share.fair_key
        )))
    END;
    is_reset constant boolean := num_nonnulls(set_fair_share.weight, set_fair_share.max_in_flight) = 0;
    old_share pgoutbox.fair_share;
    new_share pgoutbox.fair_share;
BEGIN
    PERFORM pgoutbox._raise_argument_error(problem, in_function => 'set_fair_share');
    SELECT s.*
    INTO old_share
    FROM pgoutbox.fair_share AS s
    WHERE s.queue = set_fair_share.queue AND s.fair_key = coalesce(set_fair_share.fair_key, '')
    FOR UPDATE;
    IF NOT is_reset THEN
        new_share.weight := coalesce(set_fair_share.weight, old_share.weight);
        new_share.max_in_flight := coalesce(set_fair_share.max_in_flight, old_share.max_in_flight);
    END IF;
    IF (new_share.weight, new_share.max_in_flight) IS NOT DISTINCT FROM (old_share.weight, old_share.max_in_flight) THEN
        RETURN false;
    END IF;
    IF is_reset AND set_fair_share.fair_key IS NOT NULL THEN
        DELETE FROM pgoutbox.fair_share AS s
        WHERE s.queue = set_fair_share.queue AND s.fair_key = set_fair_share.fair_key;
    ELSE
        INSERT INTO pgoutbox.fair_share (queue, fair_key, weight, max_in_flight)
        VALUES (
            set_fair_share.queue, coalesce(set_fair_share.fair_key, ''), new_share.weight, new_share.max_in_flight
        )
        ON CONFLICT ON CONSTRAINT fair_share_pkey DO UPDATE
        SET weight = excluded.weight, max_in_flight = excluded.max_in_flight;
    END IF;
    PERFORM pgoutbox._record_act(
        CASE
            WHEN new_share.max_in_flight = 0 AND old_share.max_in_flight IS DISTINCT FROM 0 THEN 'pause'
            WHEN old_share.max_in_flight = 0 AND new_share.max_in_flight IS DISTINCT FROM 0 THEN 'resume'
            ELSE 'limit'
        END,
        queue => set_fair_share.queue,
        details => jsonb_strip_nulls(jsonb_build_object('fair_key', set_fair_share.fair_key)) || jsonb_build_object(
            'weight', coalesce(to_jsonb(new_share.weight), '"none"'),
            'max_in_flight', coalesce(to_jsonb(new_share.max_in_flight), '"none"')
        )
    );
    IF new_share.max_in_flight IS DISTINCT FROM 0 THEN
        PERFORM pgoutbox._wake_all_workers(set_fair_share.queue);
    END IF;
    RETURN true;
END
$function$;
