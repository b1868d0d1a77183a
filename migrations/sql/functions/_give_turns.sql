-- Give waiting messages of a queue their turn, so that up to `total` of these topics are ready to be claimed. Returns how
-- many got it, whether others that are due still wait, the last key that it has read if there are more, and the seconds
-- until the rate of a key permits the next message.
--
-- The keys take turns in their order, from where the last round has ended. A key gets as many messages as its weight, but
-- no more than its limit in flight and its rate leave. If all keys had theirs, the rest is shared in another round. One of
-- many workers does so at a time, and reads what the others have written, so no limit is exceeded. A round leaps from key
-- to key along an index, whatever the number of their messages, and over 500 keys at most.
CREATE FUNCTION pgoutbox._give_turns(
    queue text, topics text[], total bigint,
    OUT admitted_count bigint, OUT is_waiting boolean, OUT cut_at text, OUT permit_seconds float8
)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_bitmapscan = off
SET jit = off
SET lock_timeout = '20ms'
AS $function$
#variable_conflict use_column
DECLARE
    key_limit constant integer := 500;
    place text COLLATE "C";
    first_place text COLLATE "C";
    paused_topics text[];
    holds text[];
    turn bigint := 1;
    taken record;
    left_count bigint;
BEGIN
    admitted_count := 0;
    BEGIN
        INSERT INTO pgoutbox.fair_share (queue) VALUES (_give_turns.queue) ON CONFLICT DO NOTHING;
        SELECT s.after_key
        INTO place
        FROM pgoutbox.fair_share AS s
        WHERE s.queue = _give_turns.queue AND s.fair_key = ''
        FOR UPDATE;
    EXCEPTION WHEN lock_not_available THEN
        -- A session that changes the share has not committed: other messages go on.
        is_waiting := true;
        RETURN;
    END;
    first_place := place;
    -- From here on each statement sees what the worker before has written.
    paused_topics := ARRAY(SELECT p.topic FROM pgoutbox.topic_pause_view AS p);
    holds := ARRAY(SELECT unnest(b.holds) FROM pgoutbox.breaker AS b);
    left_count := total - (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.message_live AS m
            WHERE m.queue = _give_turns.queue AND m.fair_key IS NOT NULL AND m.lane < 2 AND m.state = 'pending'
                AND pgoutbox._handled_as(m.topic, m.payload_version) = ANY (_give_turns.topics)
                AND m.topic <> ALL (paused_topics)
                AND pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) <> ALL (holds)
            LIMIT total
        ) AS ready
    );
    LOOP
        EXIT WHEN left_count <= 0;
        WITH RECURSIVE visited(key, number, is_wrapped) AS (
            SELECT place, 0, false
            UNION ALL
            SELECT next.key, v.number + 1, next.is_wrapped
            FROM visited AS v
            CROSS JOIN LATERAL (
                SELECT coalesce(later.key, first.key) AS key, v.is_wrapped OR later.key IS NULL AS is_wrapped
                FROM (
                    SELECT (
                        SELECT m.fair_key
                        FROM pgoutbox.message_live AS m
                        WHERE m.queue = _give_turns.queue AND m.lane = 2 AND m.fair_key > v.key
                        ORDER BY m.fair_key
                        LIMIT 1
                    )
                ) AS later(key)
                CROSS JOIN LATERAL (
                    SELECT CASE WHEN later.key IS NULL AND NOT v.is_wrapped THEN (
                        SELECT m.fair_key
                        FROM pgoutbox.message_live AS m
                        WHERE m.queue = _give_turns.queue AND m.lane = 2 AND m.fair_key IS NOT NULL
                        ORDER BY m.fair_key
                        LIMIT 1
                    ) END
                ) AS first(key)
            ) AS next
            WHERE v.number < key_limit AND next.key IS NOT NULL AND (NOT next.is_wrapped OR next.key <= place)
        ), share AS MATERIALIZED (
            SELECT v.key, v.number, s.*
            FROM visited AS v
            CROSS JOIN LATERAL (
                SELECT coalesce(own.weight, common.weight, 1) AS weight,
                    coalesce(own.max_in_flight, common.max_in_flight) AS max_in_flight,
                    -- The time between two messages.
                    CASE
                        WHEN own.rate_count IS NOT NULL THEN own.rate_seconds * interval '1 s' / own.rate_count
                        ELSE common.rate_seconds * interval '1 s' / common.rate_count
                    END AS spacing,
                    greatest(own.spent_at, now()) AS spent_at
                FROM pgoutbox.fair_share AS common
                LEFT JOIN pgoutbox.fair_share AS own ON own.queue = _give_turns.queue AND own.fair_key = v.key
                WHERE common.queue = _give_turns.queue AND common.fair_key = ''
            ) AS s
            WHERE v.number > 0
        ), chosen AS MATERIALIZED (
            SELECT one.place, one.id, s.key, s.number, s.spacing, s.spent_at
            FROM share AS s
            CROSS JOIN LATERAL (
                SELECT m.ctid AS place, m.id
                FROM pgoutbox.message_live AS m
                WHERE m.queue = _give_turns.queue AND m.fair_key = s.key AND m.lane = 2 AND m.state = 'pending'
                    AND m.available_at <= now()
                    AND pgoutbox._handled_as(m.topic, m.payload_version) = ANY (_give_turns.topics)
                    AND m.topic <> ALL (paused_topics)
                    AND pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) <> ALL (holds)
                ORDER BY m.available_at, m.id
                LIMIT greatest(0, least(
                    s.weight * turn,
                    -- A turn at once, and then one after the other.
                    floor(s.weight - extract(epoch FROM s.spent_at - now()) / extract(epoch FROM s.spacing)),
                    s.max_in_flight - CASE WHEN s.max_in_flight IS NOT NULL THEN (
                        SELECT count(*)
                        FROM pgoutbox.message_live AS a
                        WHERE a.queue = _give_turns.queue AND a.fair_key = s.key AND a.lane < 2
                    ) END
                ))::bigint
                FOR UPDATE OF m SKIP LOCKED
            ) AS one
            LIMIT left_count
        ), admitted AS (
            UPDATE pgoutbox.message_live AS m
            SET lane = least(m.attempt_count, 1)
            FROM chosen AS c
            WHERE m.ctid = c.place AND m.id = c.id AND m.state = 'pending' AND m.lane = 2
            RETURNING m.id
        ), spent AS (
            INSERT INTO pgoutbox.fair_share AS f (queue, fair_key, spent_at)
            SELECT _give_turns.queue, c.key, c.spent_at + count(*) * c.spacing
            FROM chosen AS c
            WHERE c.spacing IS NOT NULL
            GROUP BY c.key, c.spent_at, c.spacing
            ON CONFLICT ON CONSTRAINT fair_share_pkey DO UPDATE
            SET spent_at = excluded.spent_at
        )
        SELECT
            (SELECT count(*) FROM admitted) AS count,
            count(DISTINCT c.key) AS key_count,
            -- The last key, unless the whole round is read. It is read on only if it is not full.
            CASE
                WHEN count(*) >= left_count THEN (array_agg(c.key ORDER BY c.number DESC))[1]
                ELSE (SELECT s.key FROM share AS s WHERE s.number = key_limit)
            END AS end_key,
            CASE WHEN count(*) < left_count THEN (
                SELECT min(s.spent_at - (s.weight - 1) * s.spacing) FROM share AS s
            ) END AS permit_at
        INTO taken
        FROM chosen AS c;
        admitted_count := admitted_count + taken.count;
        left_count := left_count - taken.count;
        place := coalesce(taken.end_key, place);
        cut_at := CASE WHEN left_count > 0 THEN taken.end_key END;
        permit_seconds := extract(epoch FROM taken.permit_at - now());
        EXIT WHEN taken.count = 0 OR taken.end_key IS NOT NULL;
        turn := 1 + left_count / taken.key_count;
    END LOOP;
    IF place <> first_place THEN
        UPDATE pgoutbox.fair_share AS s
        SET after_key = place
        WHERE s.queue = _give_turns.queue AND s.fair_key = '';
    END IF;
    -- The next claim asks again.
    is_waiting := left_count <= 0 OR EXISTS (
        SELECT
        FROM pgoutbox.message_live AS m
        WHERE m.queue = _give_turns.queue AND m.lane = 2 AND m.state = 'pending' AND m.ordering_key IS NULL
            AND m.available_at <= now()
    );
END
$function$;
