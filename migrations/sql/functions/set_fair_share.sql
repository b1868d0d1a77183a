-- Set the share of a fair key, or with a null key that of all keys without an own share, and wake the workers of the queue.
-- Null leaves a value as it is. Without values, a key gets the share of its queue again, and a queue the default one. A limit
-- of 0 pauses: messages that have their turn continue. A rate is a number of turns in a number of seconds, spread over them;
-- those that it has given count under the next one too. Returns false if nothing changes.
CREATE FUNCTION pgoutbox.set_fair_share(
    queue text,
    fair_key text DEFAULT NULL,
    weight integer DEFAULT NULL,
    max_in_flight integer DEFAULT NULL,
    rate_count integer DEFAULT NULL,
    rate_seconds integer DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    given constant pgoutbox.fair_share := ROW(
        NULL, set_fair_share.weight, set_fair_share.max_in_flight, set_fair_share.rate_count, set_fair_share.rate_seconds,
        set_fair_share.queue, coalesce(set_fair_share.fair_key, ''), NULL
    );
    problem constant text := CASE
        WHEN given.queue IS NULL THEN 'queue: must not be null'
        WHEN given.weight NOT BETWEEN 1 AND 1000 THEN 'weight: must be from 1 to 1000'
        WHEN given.max_in_flight NOT BETWEEN 0 AND 1000000 THEN 'max_in_flight: must be from 0 to 1000000'
        WHEN (given.rate_count IS NULL) <> (given.rate_seconds IS NULL) THEN 'rate_count: needs rate_seconds, and the reverse'
        WHEN given.rate_count NOT BETWEEN 1 AND 1000000 THEN 'rate_count: must be from 1 to 1000000'
        WHEN given.rate_seconds NOT BETWEEN 1 AND 2592000 THEN 'rate_seconds: must be from 1 to 2592000, 30 days'
        ELSE pgoutbox._draft_error(pgoutbox._draft('topic', '1', jsonb_build_object(
            'queue', given.queue, 'fair_key', set_fair_share.fair_key
        )))
    END;
    is_reset constant boolean := num_nonnulls(given.weight, given.max_in_flight, given.rate_count) = 0;
    old_share pgoutbox.fair_share;
    new_share pgoutbox.fair_share := given;
BEGIN
    PERFORM pgoutbox._raise_argument_error(problem, in_function => 'set_fair_share');
    -- As in _give_turns: first the row of the queue. So two acts on a key that has no row follow each other.
    INSERT INTO pgoutbox.fair_share (queue) VALUES (given.queue) ON CONFLICT DO NOTHING;
    PERFORM FROM pgoutbox.fair_share AS s WHERE s.queue = given.queue AND s.fair_key = '' FOR UPDATE;
    SELECT s.*
    INTO old_share
    FROM pgoutbox.fair_share AS s
    WHERE s.queue = given.queue AND s.fair_key = given.fair_key
    FOR UPDATE;
    IF NOT is_reset THEN
        new_share.weight := coalesce(given.weight, old_share.weight);
        new_share.max_in_flight := coalesce(given.max_in_flight, old_share.max_in_flight);
        new_share.rate_count := coalesce(given.rate_count, old_share.rate_count);
        new_share.rate_seconds := coalesce(given.rate_seconds, old_share.rate_seconds);
    END IF;
    IF (new_share.weight, new_share.max_in_flight, new_share.rate_count, new_share.rate_seconds)
        IS NOT DISTINCT FROM (old_share.weight, old_share.max_in_flight, old_share.rate_count, old_share.rate_seconds)
    THEN
        RETURN false;
    END IF;
    INSERT INTO pgoutbox.fair_share (queue, fair_key, weight, max_in_flight, rate_count, rate_seconds)
    VALUES (
        given.queue, given.fair_key,
        new_share.weight, new_share.max_in_flight, new_share.rate_count, new_share.rate_seconds
    )
    ON CONFLICT ON CONSTRAINT fair_share_pkey DO UPDATE
    SET weight = excluded.weight,
        max_in_flight = excluded.max_in_flight,
        rate_count = excluded.rate_count,
        rate_seconds = excluded.rate_seconds;
    -- One that still knows the turns that a rate has given is deleted later.
    DELETE FROM pgoutbox.fair_share AS s
    WHERE s.queue = given.queue AND s.fair_key = given.fair_key AND s.fair_key <> ''
        AND num_nonnulls(s.weight, s.max_in_flight, s.rate_count) = 0
        AND (s.spent_at > now()) IS NOT TRUE;
    PERFORM pgoutbox._record_act(
        CASE
            WHEN new_share.max_in_flight = 0 AND old_share.max_in_flight IS DISTINCT FROM 0 THEN 'pause'
            WHEN old_share.max_in_flight = 0 AND new_share.max_in_flight IS DISTINCT FROM 0 THEN 'resume'
            ELSE 'limit'
        END,
        queue => given.queue,
        details => jsonb_strip_nulls(jsonb_build_object('fair_key', set_fair_share.fair_key)) || jsonb_build_object(
            'weight', coalesce(to_jsonb(new_share.weight), '"none"'),
            'max_in_flight', coalesce(to_jsonb(new_share.max_in_flight), '"none"'),
            'rate', coalesce(new_share.rate_count || ' in ' || new_share.rate_seconds || ' s', 'none')
        )
    );
    IF new_share.max_in_flight IS DISTINCT FROM 0 THEN
        PERFORM pgoutbox._wake_all_workers(given.queue);
    END IF;
    RETURN true;
END
$function$;
