-- Claim up to `total` due messages of the lanes of some queues. A lane is exhausted before the next one begins, so a
-- strict order of queues is the order of the arrays, and one statement serves any number of queues. Lane 0 has the
-- fresh messages, and lane 1 the retries. Those with an ordering key are read by their keys: in lane 2 those that fell
-- due lately and those of the keys in `known_keys`, in lane 3 all keys, page after page.
-- `judged` chooses and locks rows, and decides what becomes of each. `claim` writes one lease for all attempts that
-- begin in a queue. The UPDATE writes the decisions. Each page of ordering keys ends with a row without a message: its
-- ordering key is the one after which the next page begins, '' if no key follows. The row is missing if the limits cut
-- the page.
-- A claim that reads neither leaves out the parts in brackets: even unused they would make it slower by a third.
-- A breaker is open while it has a row. Its holds are texts: queue, topic with a later version, and scheme or host, with
-- spaces between them. A claim leaves out the messages of these holds, unless they end: expired, superseded or
-- cancelled. After the pause of a breaker, a claim with the parts `probe` in place of `lanes` begins the attempt of one
-- message behind it, and with it the probe. If none can be claimed, it removes their hold.
-- The messages of a paused topic are left out in the same way.
-- Guards: row locks; the place of the row in the UPDATE; the unique indexes on keys in flight.
WITH
-- [probe
paused AS MATERIALIZED (
    -- One hold of those that may be probed, at random: each gets its turn, however many breakers are open.
    SELECT b.key, held.hold, split_part(held.hold, ' ', 1) AS queue
    FROM pgoutbox.breaker AS b
    CROSS JOIN LATERAL unnest(b.holds) AS held(hold)
    WHERE b.retry_at <= now() AND (b.probe_until IS NULL OR b.probe_until <= now())
        AND split_part(held.hold, ' ', 2) = ANY (%(topics)s::text[])
        -- A paused topic keeps its holds.
        AND split_part(split_part(held.hold, ' ', 2), '@', 1) <> ALL (ARRAY(SELECT p.topic FROM pgoutbox.topic_pause_view AS p))
        -- A queue that is paused or has no permit keeps its holds. The array is made once, and not for each hold.
        AND split_part(held.hold, ' ', 1) = ANY (ARRAY(
            SELECT q.name FROM unnest(%(queues)s::text[]) AS q(name) WHERE pgoutbox.next_permit_at(q.name) IS NULL
        ))
    ORDER BY random()
    LIMIT 1
    -- Two workers do not search at once.
    FOR UPDATE OF b SKIP LOCKED
), half_open AS MATERIALIZED (
    -- Without a permit nothing is read, and the hold stays.
    SELECT p.*, pgoutbox._permits(p.queue, 1, known.rate_count IS NOT NULL) AS permits
    FROM paused AS p
    LEFT JOIN pgoutbox.queue AS known ON known.name = p.queue
),
-- probe]
judged AS MATERIALIZED (
    -- [probe
    -- Fresh messages first, so that a message that is itself at fault does not fail every probe: nested loops, the only
    -- joins of a worker's session, read the lanes in the order of their rows.
    SELECT found.*
    FROM half_open AS h
    CROSS JOIN LATERAL (
        SELECT one.*
        FROM (VALUES (0), (1)) AS lane(number)
        CROSS JOIN LATERAL (
            SELECT m.ctid AS place, m.id, m.queue, m.coalesce_key AS key, m.topic AS scope, false AS is_ordered,
                NULL::bigint AS newer_id, 'sending' AS state, m.lane
            FROM pgoutbox.message_live AS m
            LEFT JOIN LATERAL (
                SELECT h.newest_id FROM pgoutbox.key_head AS h
                WHERE h.scope = m.topic AND h.key = m.coalesce_key AND h.newest_id > m.id LIMIT 1
            ) AS head ON true
            LEFT JOIN LATERAL (
                SELECT s.id FROM pgoutbox.message_live AS s
                WHERE s.topic = m.topic AND s.key_in_flight = m.coalesce_key AND s.ordering_key IS NULL LIMIT 1
            ) AS sibling ON true
            WHERE m.queue = h.queue AND m.lane = lane.number AND m.ordering_key IS NULL
                AND m.available_at <= now() AND m.state = 'pending'
                -- It has the name of a topic that this worker handles.
                AND pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) = h.hold
                AND (m.expires_at <= now()) IS NOT TRUE AND head.newest_id IS NULL AND sibling.id IS NULL
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.cancel_request AS c
                    WHERE c.message_id = m.id AND c.message_created_at = m.created_at
                    OFFSET 0
                )
            ORDER BY m.available_at, m.id
            LIMIT 1
            FOR UPDATE OF m SKIP LOCKED
        ) AS one
        UNION ALL
        SELECT ordered.*
        FROM (
            SELECT m.ctid, m.id, m.queue, m.ordering_key, m.queue, true, NULL::bigint, 'sending', 2
            FROM pgoutbox.message_live AS m
            WHERE m.queue = h.queue AND m.ordering_key IS NOT NULL
                -- `> '-infinity'` is always true: it permits the index message_live_ordered_due.
                AND m.available_at <= now() AND m.available_at > '-infinity' AND m.state = 'pending'
                -- It has the name of a topic that this worker handles.
                AND pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) = h.hold
                AND (m.expires_at <= now()) IS NOT TRUE
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.cancel_request AS c
                    WHERE c.message_id = m.id AND c.message_created_at = m.created_at
                    OFFSET 0
                )
                -- The conditions of lanes 2 and 3: the first message of its key, none in flight, and none failed before it.
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.message_live AS s
                    WHERE s.queue = m.queue AND s.ordering_key = m.ordering_key AND (s.id < m.id OR s.state = 'sending')
                    OFFSET 0
                )
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.message_failed AS f
                    WHERE f.queue = m.queue AND f.ordering_key = m.ordering_key AND f.halts_key AND f.id < m.id
                    OFFSET 0
                )
            ORDER BY m.available_at
            LIMIT 1
            FOR UPDATE OF m SKIP LOCKED
        ) AS ordered
        LIMIT h.permits
    ) AS found
    -- probe]
    -- [lanes
    SELECT found.*
    FROM unnest(%(served)s::text[]) AS served(queue)
    LEFT JOIN pgoutbox.queue AS known ON known.name = served.queue
    CROSS JOIN LATERAL (
        SELECT one.*
        FROM unnest(
            %(queues)s::text[], %(lanes)s::smallint[], %(after_ats)s::timestamptz[], %(after_ids)s::bigint[],
            %(since_seconds)s::float8[], %(after_keys)s::text[]
        ) WITH ORDINALITY AS lane(queue, number, after_at, after_id, since_seconds, after_key, place)
        CROSS JOIN LATERAL (
            -- [ordering keys
            -- One page of ordering keys: it leaps from key to key along an index, whatever the number of their messages.
            WITH RECURSIVE visited(key, number) AS (
                SELECT coalesce(
                    lane.after_key,
                    -- The first page of a process begins at a random key: if each began at the first one, short
                    -- processes would never reach the last ones. The sample has about fifty pages of the table.
                    (
                        SELECT m.ordering_key
                        FROM pgoutbox.message_live AS m
                            TABLESAMPLE system (least(100, 5000.0 * 8192 / (1 + pg_relation_size('pgoutbox.message_live'))))
                        WHERE m.queue = lane.queue AND m.ordering_key IS NOT NULL
                            -- Without such messages the sample is not read.
                            AND EXISTS (
                                SELECT FROM pgoutbox.message_live AS o
                                WHERE o.queue = lane.queue AND o.ordering_key IS NOT NULL
                            )
                        ORDER BY random()
                        LIMIT 1
                    ),
                    ''
                ) COLLATE "C", 0
                WHERE lane.number = 3
                UNION ALL
                SELECT next.ordering_key, v.number + 1
                FROM visited AS v
                CROSS JOIN LATERAL (
                    SELECT m.ordering_key
                    FROM pgoutbox.message_live AS m
                    WHERE m.queue = lane.queue AND m.ordering_key > v.key
                    ORDER BY m.ordering_key
                    LIMIT 1
                ) AS next
                WHERE v.number < %(key_limit)s::integer
            )
            -- ordering keys]
            -- UNION does not take FOR UPDATE, except in a subquery.
            SELECT due.*
            FROM (
                SELECT m.ctid AS place, m.id, m.queue, m.coalesce_key AS key, m.topic AS scope, false AS is_ordered,
                    head.newest_id AS newer_id,
                    CASE
                        WHEN EXISTS (
                            SELECT FROM pgoutbox.cancel_request AS c
                            WHERE c.message_id = m.id AND c.message_created_at = m.created_at
                        ) THEN 'cancelled'
                        WHEN head.newest_id IS NOT NULL OR m.expires_at <= now() THEN 'skipped'
                        ELSE 'sending'
                    END AS state,
                    m.lane
                FROM pgoutbox.message_live AS m
                -- The newer message of the same key that supersedes this one. With LIMIT, PostgreSQL looks up each key: with a
                -- join it may plan to read all keys, because statistics may describe an empty table.
                LEFT JOIN LATERAL (
                    SELECT h.newest_id FROM pgoutbox.key_head AS h
                    WHERE h.scope = m.topic AND h.key = m.coalesce_key AND h.newest_id > m.id LIMIT 1
                ) AS head ON true
                -- The message of the same key in flight; an ordering key is another key, even with the same text.
                LEFT JOIN LATERAL (
                    SELECT s.id FROM pgoutbox.message_live AS s
                    WHERE s.topic = m.topic AND s.key_in_flight = m.coalesce_key AND s.ordering_key IS NULL LIMIT 1
                ) AS sibling ON true
                WHERE m.queue = lane.queue AND m.lane = lane.number AND m.ordering_key IS NULL
                    AND m.available_at <= now() AND m.state = 'pending'
                    AND pgoutbox._handled_as(m.topic, m.payload_version) = ANY (%(topics)s::text[])
                    -- Behind the last message that this process has read in the lane, or at first what falls due from a time on.
                    AND (m.available_at, m.id) > (
                        coalesce(lane.after_at, now() - make_interval(secs => lane.since_seconds)), lane.after_id
                    )
                    -- Without an open breaker, the left side of NOT IN is not computed: PostgreSQL hashes the right
                    -- side first, and finds it empty. Neither side is ever null. The array is made once for a claim.
                    AND (
                        (
                            m.topic <> ALL (ARRAY(SELECT p.topic FROM pgoutbox.topic_pause_view AS p))
                            AND pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) NOT IN (
                                SELECT unnest(b.holds) FROM pgoutbox.breaker AS b
                            )
                        )
                        OR m.expires_at <= now()
                        OR head.newest_id IS NOT NULL
                        OR (m.id, m.created_at) IN (
                            SELECT c.message_id, c.message_created_at FROM pgoutbox.cancel_request AS c
                        )
                    )
                    -- Two messages of a key are never in flight: this one waits for its sibling, which may be older or
                    -- newer. If it is superseded, it ends instead.
                    AND (sibling.id IS NULL OR head.newest_id IS NOT NULL)
                ORDER BY m.available_at, m.id
                -- Lanes 2 and 3 are read below.
                LIMIT CASE WHEN lane.number < 2 THEN %(total)s::bigint ELSE 0 END
                -- A wait would fail with 40001 when the row moves to another partition.
                FOR UPDATE OF m SKIP LOCKED
            ) AS due
            -- [ordering keys
            UNION ALL
            (
                SELECT ordered.*
                FROM (
                    SELECT v.key
                    FROM visited AS v
                    WHERE v.number > 0
                    UNION ALL
                    SELECT DISTINCT known.key COLLATE "C"
                    FROM (
                        SELECT k.key
                        FROM unnest(%(known_lanes)s::smallint[], %(known_keys)s::text[]) AS k(lane, key)
                        WHERE k.lane = lane.place
                        UNION ALL
                        (
                            -- The newest ones: those before them are found page after page.
                            SELECT m.ordering_key
                            FROM pgoutbox.message_live AS m
                            WHERE m.queue = lane.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
                                AND m.available_at <= now()
                                AND m.available_at > now() - make_interval(secs => lane.since_seconds)
                                -- Always true: it permits the index message_live_ordered_due.
                                AND m.available_at > '-infinity'
                            ORDER BY m.available_at DESC
                            LIMIT %(key_limit)s::integer
                        )
                    ) AS known(key)
                    WHERE lane.number = 2
                ) AS v
                CROSS JOIN LATERAL (
                    -- The first message of the key, if it is due. It has no coalesce key, so no other message supersedes it.
                    SELECT m.ctid, m.id, m.queue, m.ordering_key, m.queue, true, NULL::bigint,
                        CASE
                            WHEN EXISTS (
                                SELECT FROM pgoutbox.cancel_request AS c
                                WHERE c.message_id = m.id AND c.message_created_at = m.created_at
                            ) THEN 'cancelled'
                            WHEN m.expires_at <= now() THEN 'skipped'
                            ELSE 'sending'
                        END,
                        lane.number
                    FROM pgoutbox.message_live AS m
                    WHERE m.id = (
                            SELECT f.id
                            FROM pgoutbox.message_live AS f
                            WHERE f.queue = lane.queue AND f.ordering_key = v.key
                            ORDER BY f.id
                            LIMIT 1
                        )
                        AND m.available_at <= now() AND m.state = 'pending'
                        AND pgoutbox._handled_as(m.topic, m.payload_version) = ANY (%(topics)s::text[])
                        AND (
                            (
                                m.topic <> ALL (ARRAY(SELECT p.topic FROM pgoutbox.topic_pause_view AS p))
                                AND pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) NOT IN (
                                    SELECT unnest(b.holds) FROM pgoutbox.breaker AS b
                                )
                            )
                            OR m.expires_at <= now()
                            OR (m.id, m.created_at) IN (
                                SELECT c.message_id, c.message_created_at FROM pgoutbox.cancel_request AS c
                            )
                        )
                        -- No other message of the key is in flight: a later one may be, if this one has failed before
                        -- and was redriven. OFFSET 0 makes PostgreSQL look up each key in the index, whatever the
                        -- statistics say.
                        AND NOT EXISTS (
                            SELECT FROM pgoutbox.message_live AS s
                            WHERE s.queue = lane.queue AND s.key_in_flight = v.key AND s.ordering_key IS NOT NULL
                            OFFSET 0
                        )
                        -- No failed message before it halts the key.
                        AND NOT EXISTS (
                            SELECT FROM pgoutbox.message_failed AS f
                            WHERE f.queue = lane.queue AND f.ordering_key = v.key AND f.halts_key AND f.id < m.id
                            OFFSET 0
                        )
                    FOR UPDATE OF m SKIP LOCKED
                ) AS ordered
                LIMIT %(total)s::bigint
            )
            UNION ALL
            SELECT NULL, NULL, lane.queue, CASE WHEN max(v.number) = %(key_limit)s::integer THEN max(v.key) ELSE '' END,
                NULL, true, NULL, NULL, 3
            FROM visited AS v
            -- Other lanes have no page.
            HAVING count(*) > 0
            -- ordering keys]
        ) AS one
        WHERE lane.queue = served.queue
        -- It locks the row of a queue with limits until the commit, and gives 0 to a claim that does not get it, or
        -- that does not see its new rate: `spent` would take no tokens. All lanes of a queue share its permits. Rows
        -- beyond this LIMIT are not locked: each row is locked when it is read, and nothing between FOR UPDATE and the
        -- LIMIT sorts.
        LIMIT pgoutbox._permits(served.queue, %(total)s::bigint, known.rate_count IS NOT NULL)
    ) AS found
    LIMIT %(total)s::bigint
    -- lanes]
), begun AS (
    -- `claimed_at` is the name of a claim, so it is the real time, and differs from queue to queue. Which queue gets which
    -- number does not matter.
    SELECT q.queue, q.ids, clock_timestamp() + row_number() OVER () * interval '1 us' AS claimed_at
    FROM (SELECT j.queue, array_agg(j.id) AS ids FROM judged AS j WHERE j.state = 'sending' GROUP BY j.queue) AS q
), claim AS (
    INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
    SELECT b.claimed_at, now() + make_interval(secs => %(lease_seconds)s::float8), b.queue, %(worker)s::text, b.ids
    FROM begun AS b
    RETURNING claimed_at, queue, cardinality(ids) AS count
), spent AS (
    -- A token of the rate for each attempt. Taken with the claim, so that a crash uses them up and never exceeds the
    -- rate. The trigger queue_attempts records the new begun_count under tokens_at, which therefore grows even if the
    -- clock was set back. The UPDATE reads the newest version of the row, which `_permits` has locked.
    UPDATE pgoutbox.queue AS q
    SET tokens = greatest(0, pgoutbox._bucket_of(q, c.claimed_at) - c.count),
        tokens_at = greatest(c.claimed_at, q.tokens_at + interval '1 us'),
        begun_count = q.begun_count + c.count
    FROM claim AS c
    WHERE q.name = c.queue AND q.rate_count IS NOT NULL
), written AS (
    UPDATE pgoutbox.message AS m
    SET state = j.state,
        attempt_count = m.attempt_count + CASE WHEN j.state = 'sending' THEN 1 ELSE 0 END,
        claimed_at = CASE WHEN j.state = 'sending' THEN j.claimed_at ELSE m.claimed_at END,
        worker = CASE WHEN j.state = 'sending' THEN %(worker)s::text ELSE m.worker END,
        key_in_flight = CASE WHEN j.state = 'sending' THEN coalesce(m.coalesce_key, m.ordering_key) END,
        finished_at = CASE WHEN j.state <> 'sending' THEN now() END,
        skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.newer_id, 'expired') END,
        superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END
    FROM (
        -- The one claim of its queue. Without messages that begin, there is none.
        SELECT o.*, (SELECT c.claimed_at FROM claim AS c WHERE c.queue = o.queue) AS claimed_at
        -- All claims enter their keys into the unique indexes in one order, so that none waits for another in a circle.
        -- The nested loop from these rows to the places keeps it: prepare_session.sql, or prepare_transaction.sql
        -- behind a pooler, turns off all other joins. Messages without a key enter nothing: the CASE spares comparing
        -- topics.
        FROM (SELECT * FROM judged ORDER BY key, is_ordered, CASE WHEN key IS NOT NULL THEN scope END) AS o
    ) AS j
    -- A row that has changed since this statement's snapshot is not at its place. The state restricts the plan to
    -- message_live, where the place was found; the statement names the parent, because rows that end leave this
    -- partition.
    WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'pending'
    RETURNING m.id, m.topic, m.destination,
        -- Null above 16 kB, so that a claim is bounded; its attempt reads it. The stored size, which may be compressed,
        -- is known without reading the payload. OFFSET 0 makes the text once.
        (
            SELECT CASE WHEN octet_length(p.body) <= 16384 THEN p.body END
            FROM (SELECT CASE WHEN pg_column_size(m.payload) <= 16384 THEN m.payload::text END OFFSET 0) AS p(body)
        ) AS payload,
        m.headers::text AS headers, m.attempt_count, m.max_attempts, m.attempt_budget, m.created_at, m.available_at,
        m.coalesce_key, m.ordering_key, m.content_id, m.claimed_at, m.state,
        -- PostgreSQL before version 17 cannot subtract from infinity.
        extract(epoch FROM CASE WHEN isfinite(m.expires_at) THEN m.expires_at - now() END)::float8 AS expires_in,
        -- Places for what the worker finds out, whether it is superseded meanwhile, and for what lapsed.sql returns.
        false AS is_superseded, m.queue, NULL::text AS lost_session, j.lane, m.payload_version
)
-- [probe
, probed AS (
    UPDATE pgoutbox.breaker AS b
    -- A message that has changed since this statement's snapshot is not written: then nothing probes, and the hold stays.
    SET probe_id = CASE WHEN w.id IS NULL THEN b.probe_id ELSE gen_random_uuid() END,
        probe_until = CASE
            WHEN w.id IS NULL THEN b.probe_until ELSE now() + make_interval(secs => %(probe_seconds)s::float8)
        END,
        worker = CASE WHEN w.id IS NULL THEN b.worker ELSE %(worker)s::text END,
        -- Messages may only have been locked: then the first one that meets the open breaker adds the hold again.
        holds = CASE WHEN j.id IS NULL THEN array_remove(b.holds, h.hold) ELSE b.holds END
    FROM half_open AS h
    LEFT JOIN judged AS j ON true
    LEFT JOIN written AS w ON true
    -- By its key and not by the place of its row: the attempt has begun, even if the breaker has changed meanwhile.
    WHERE b.key = h.key AND h.permits > 0
    RETURNING b.key, b.probe_id, h.hold
)
SELECT w.*, p.key, p.probe_id::text, p.hold FROM written AS w CROSS JOIN probed AS p
-- probe]
-- [lanes
SELECT w.* FROM written AS w
-- [ordering keys
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, j.key, NULL, NULL, NULL, NULL, NULL, j.queue, NULL, 3,
    NULL
FROM judged AS j
WHERE j.id IS NULL
-- ordering keys]
-- lanes]
