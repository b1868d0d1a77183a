-- Set the share of a fair key, or with a null key that of all keys without an own share, and wake the workers of the queue.
-- Null leaves a value as it is, and `remove` names those of `weight`, `max_in_flight` and `rate` that end. If nothing is given,
-- a key gets the share of its queue again, and a queue the default one. A limit of 0 pauses: messages that have their turn
-- continue. `rate_count` messages get their turn in `rate_seconds`, spread over them; the messages of one turn may begin at
-- once. A new rate counts the messages that have had their turn before. Returns false if nothing changes.
CREATE FUNCTION pgoutbox.set_fair_share(
    queue text,
    fair_key text DEFAULT NULL,
    weight integer DEFAULT NULL,
    max_in_flight integer DEFAULT NULL,
    rate_count integer DEFAULT NULL,
    rate_seconds integer DEFAULT NULL,
    remove text[] DEFAULT '{}'
)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    removed constant text[] := coalesce(set_fair_share.remove, '{}');
    given_count constant integer := num_nonnulls(
        set_fair_share.weight, set_fair_share.max_in_flight, set_fair_share.rate_count
    );
    problem constant text := CASE
        WHEN set_fair_share.queue IS NULL THEN 'queue: must not be null'
        WHEN set_fair_share.weight NOT BETWEEN 1 AND 1000 THEN 'weight: must be from 1 to 1000'
        WHEN set_fair_share.max_in_flight NOT BETWEEN 0 AND 1000000 THEN 'max_in_flight: must be from 0 to 1000000'
        WHEN set_fair_share.rate_count NOT BETWEEN 1 AND 1000000 THEN 'rate_count: must be from 1 to 1000000'
        WHEN set_fair_share.rate_seconds NOT BETWEEN 1 AND 2592000 THEN 'rate_seconds: must be from 1 to 2592000'
        WHEN num_nulls(set_fair_share.rate_count, set_fair_share.rate_seconds) = 1
            THEN 'rate_seconds: must be given together with rate_count'
        WHEN NOT removed <@ '{weight, max_in_flight, rate}' THEN 'remove: must be of weight, max_in_flight and rate'
        WHEN removed && array_remove(ARRAY[
            CASE WHEN set_fair_share.weight IS NOT NULL THEN 'weight' END,
            CASE WHEN set_fair_share.max_in_flight IS NOT NULL THEN 'max_in_flight' END,
            CASE WHEN set_fair_share.rate_count IS NOT NULL THEN 'rate' END
        ], NULL) THEN 'remove: must not name a value that is given too'
        ELSE pgoutbox._draft_error(pgoutbox._draft('topic', '1', jsonb_build_object(
            'queue', set_fair_share.queue, 'fair_key', set_fair_share.fair_key
        )))
    END;
    is_reset constant boolean := given_count = 0 AND removed = '{}';
    common_share pgoutbox.fair_share;
    old_share pgoutbox.fair_share;
    new_share pgoutbox.fair_share;
    old_spacing interval; -- The time between two messages of a key.
    new_spacing interval;
BEGIN
    PERFORM pgoutbox._raise_argument_error(problem, in_function => 'set_fair_share');
    -- As in _give_turns, the row of the queue is locked before that of a key. So of two calls for a new key the second one
    -- sees the values of the first, and no turn is given by the old rate after this has read when it is spent.
    IF given_count > 0 THEN
        INSERT INTO pgoutbox.fair_share (queue) VALUES (set_fair_share.queue) ON CONFLICT DO NOTHING;
    END IF;
    SELECT s.*
    INTO common_share
    FROM pgoutbox.fair_share AS s
    WHERE s.queue = set_fair_share.queue AND s.fair_key = ''
    FOR UPDATE;
    SELECT s.*
    INTO old_share
    FROM pgoutbox.fair_share AS s
    WHERE s.queue = set_fair_share.queue AND s.fair_key = coalesce(set_fair_share.fair_key, '')
    FOR UPDATE;
    IF NOT is_reset THEN
        new_share.weight := coalesce(
            set_fair_share.weight, CASE WHEN 'weight' <> ALL (removed) THEN old_share.weight END
        );
        new_share.max_in_flight := coalesce(
            set_fair_share.max_in_flight, CASE WHEN 'max_in_flight' <> ALL (removed) THEN old_share.max_in_flight END
        );
        new_share.rate_count := coalesce(
            set_fair_share.rate_count, CASE WHEN 'rate' <> ALL (removed) THEN old_share.rate_count END
        );
        new_share.rate_seconds := coalesce(
            set_fair_share.rate_seconds, CASE WHEN 'rate' <> ALL (removed) THEN old_share.rate_seconds END
        );
    END IF;
    IF (new_share.weight, new_share.max_in_flight, new_share.rate_count, new_share.rate_seconds)
        IS NOT DISTINCT FROM (old_share.weight, old_share.max_in_flight, old_share.rate_count, old_share.rate_seconds)
    THEN
        RETURN false;
    END IF;
    INSERT INTO pgoutbox.fair_share (queue, fair_key, weight, max_in_flight, rate_count, rate_seconds)
    VALUES (
        set_fair_share.queue, coalesce(set_fair_share.fair_key, ''),
        new_share.weight, new_share.max_in_flight, new_share.rate_count, new_share.rate_seconds
    )
    ON CONFLICT ON CONSTRAINT fair_share_pkey DO UPDATE
    SET weight = excluded.weight,
        max_in_flight = excluded.max_in_flight,
        rate_count = excluded.rate_count,
        rate_seconds = excluded.rate_seconds;
    old_spacing := coalesce(
        old_share.rate_seconds * interval '1 s' / old_share.rate_count,
        common_share.rate_seconds * interval '1 s' / common_share.rate_count
    );
    new_spacing := coalesce(
        new_share.rate_seconds * interval '1 s' / new_share.rate_count,
        CASE WHEN set_fair_share.fair_key IS NOT NULL THEN
            common_share.rate_seconds * interval '1 s' / common_share.rate_count
        END
    );
    -- Keys have spent as many messages under the new rate as under the old one. Without an old one it is a turn at most.
    IF new_spacing <> old_spacing OR old_spacing IS NULL THEN
        UPDATE pgoutbox.fair_share AS s
        SET spent_at = now() + CASE
            WHEN old_spacing IS NULL THEN least(
                s.spent_at - now(),
                new_spacing * coalesce(
                    s.weight, CASE WHEN set_fair_share.fair_key IS NULL THEN new_share.weight ELSE common_share.weight END, 1
                )
            )
            ELSE new_spacing * (extract(epoch FROM s.spent_at - now()) / extract(epoch FROM old_spacing))::float8
        END
        WHERE s.queue = set_fair_share.queue AND s.spent_at > now() AND new_spacing IS NOT NULL
            AND CASE
                WHEN set_fair_share.fair_key IS NULL THEN s.rate_count IS NULL
                ELSE s.fair_key = set_fair_share.fair_key
            END;
    END IF;
    -- If a reset forgot when the rate is spent, the same rate would permit a turn at once.
    DELETE FROM pgoutbox.fair_share AS s
    WHERE s.queue = set_fair_share.queue AND s.fair_key = set_fair_share.fair_key
        AND num_nonnulls(s.weight, s.max_in_flight, s.rate_count) = 0
        AND (s.spent_at > now()) IS NOT TRUE;
    PERFORM pgoutbox._record_act(
        CASE
            WHEN new_share.max_in_flight = 0 AND old_share.max_in_flight IS DISTINCT FROM 0 THEN 'pause'
            WHEN old_share.max_in_flight = 0 AND new_share.max_in_flight IS DISTINCT FROM 0 THEN 'resume'
            ELSE 'limit'
        END,
        queue => set_fair_share.queue,
        details => jsonb_strip_nulls(jsonb_build_object('fair_key', set_fair_share.fair_key)) || jsonb_build_object(
            'weight', coalesce(to_jsonb(new_share.weight), '"none"'),
            'max_in_flight', coalesce(to_jsonb(new_share.max_in_flight), '"none"'),
            'rate', coalesce(new_share.rate_count || '/' || new_share.rate_seconds || 's', 'none')
        )
    );
    IF new_share.max_in_flight IS DISTINCT FROM 0 THEN
        PERFORM pgoutbox._wake_all_workers(set_fair_share.queue);
    END IF;
    RETURN true;
END
$function$;
