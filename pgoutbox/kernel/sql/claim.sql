-- Claim up to `total` due messages of the lanes of some queues. A lane is exhausted before the next one begins, so a strict
-- order of queues is the order of the arrays, and one statement serves any number of queues.
-- `judged` chooses and locks rows, and decides what becomes of each. `claim` writes one lease for all attempts that begin in
-- a queue. The UPDATE writes the decisions.
-- Guards: row locks; the place of the row in the UPDATE; the unique index on keys in flight.
WITH judged AS MATERIALIZED (
    SELECT found.*
    FROM unnest(
        %(queues)s::text[], %(lanes)s::smallint[], %(after_ats)s::timestamptz[], %(after_ids)s::bigint[],
        %(since_seconds)s::float8[]
    ) AS lane(queue, number, after_at, after_id, since_seconds)
    CROSS JOIN LATERAL (
        SELECT m.ctid AS place, m.id, m.queue, m.topic, m.coalesce_key AS key, head.newest_id AS newer_id,
            CASE
                WHEN EXISTS (
                    SELECT FROM pgoutbox.cancel_request AS c
                    WHERE c.message_id = m.id AND c.message_created_at = m.created_at
                ) THEN 'cancelled'
                WHEN head.newest_id IS NOT NULL OR m.expires_at <= now() THEN 'skipped'
                ELSE 'sending'
            END AS state
        FROM pgoutbox.message_live AS m
        -- The newer message of the same key that supersedes this one.
        LEFT JOIN pgoutbox.key_head AS head
            ON head.scope = m.topic AND head.key = m.coalesce_key AND head.newest_id > m.id
        -- The message of the same key in flight; an ordering key is another key, even with the same text.
        LEFT JOIN LATERAL (
            SELECT s.id FROM pgoutbox.message_live AS s
            WHERE s.topic = m.topic AND s.key_in_flight = m.coalesce_key AND s.ordering_key IS NULL LIMIT 1
        ) AS sibling ON true
        WHERE m.queue = lane.queue AND m.lane = lane.number AND m.ordering_key IS NULL
            AND m.available_at <= now() AND m.state = 'pending'
            AND m.topic = ANY (%(topics)s::text[])
            AND (m.available_at, m.id) > (
                coalesce(lane.after_at, now() - make_interval(secs => lane.since_seconds)), lane.after_id
            )
            -- Two messages of a key are never in flight: this one waits for its sibling, unless it is superseded.
            AND (sibling.id IS NULL OR head.newest_id IS NOT NULL)
        ORDER BY m.available_at, m.id
        -- It locks the row of a queue with limits until the commit, and gives 0 to a claim that does not get it.
        LIMIT pgoutbox._permits(lane.queue, %(total)s::bigint)
        -- A wait would fail with 40001 when the row moves to another partition.
        FOR UPDATE OF m SKIP LOCKED
    ) AS found
    LIMIT %(total)s::bigint
), begun AS (
    -- `claimed_at` is the name of a claim, so it is the real time, and differs from queue to queue.
    SELECT q.queue, q.ids, clock_timestamp() + row_number() OVER () * interval '1 us' AS claimed_at
    FROM (SELECT j.queue, array_agg(j.id) AS ids FROM judged AS j WHERE j.state = 'sending' GROUP BY j.queue) AS q
), claim AS (
    INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
    SELECT b.claimed_at, now() + make_interval(secs => %(lease_seconds)s::float8), b.queue, %(worker)s::text, b.ids
    FROM begun AS b
    RETURNING claimed_at, queue, cardinality(ids) AS count
), spent AS (
    -- A token of the rate for each attempt. Taken with the claim, so that a crash uses them up and never exceeds the rate.
    UPDATE pgoutbox.queue AS q
    SET tokens = greatest(0, pgoutbox._bucket_of(q, c.claimed_at) - c.count),
        tokens_at = greatest(c.claimed_at, q.tokens_at + interval '1 us'),
        begun_count = q.begun_count + c.count
    FROM claim AS c
    WHERE q.name = c.queue AND q.rate_count IS NOT NULL
)
UPDATE pgoutbox.message AS m
SET state = j.state,
    attempt_count = m.attempt_count + CASE WHEN j.state = 'sending' THEN 1 ELSE 0 END,
    claimed_at = CASE WHEN j.state = 'sending' THEN j.claimed_at ELSE m.claimed_at END,
    worker = CASE WHEN j.state = 'sending' THEN %(worker)s::text ELSE m.worker END,
    key_in_flight = CASE WHEN j.state = 'sending' THEN m.coalesce_key END,
    finished_at = CASE WHEN j.state <> 'sending' THEN now() END,
    skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.newer_id, 'expired') END,
    superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END
FROM (
    SELECT o.*, (SELECT c.claimed_at FROM claim AS c WHERE c.queue = o.queue) AS claimed_at
    -- All claims enter their keys into the unique index in one order, so that none waits for another in a circle.
    FROM (SELECT * FROM judged ORDER BY key, CASE WHEN key IS NOT NULL THEN topic END) AS o
) AS j
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'pending'
RETURNING m.id, m.topic, m.destination,
    -- Null above 16 kB, so that a claim is bounded; its attempt reads it. OFFSET 0 makes the text once.
    (
        SELECT CASE WHEN octet_length(p.body) <= 16384 THEN p.body END
        FROM (SELECT CASE WHEN pg_column_size(m.payload) <= 16384 THEN m.payload::text END OFFSET 0) AS p(body)
    ),
    m.headers::text, m.attempt_count, m.max_attempts, m.attempt_budget, m.created_at, m.available_at,
    m.coalesce_key, m.ordering_key, m.content_id, m.claimed_at, m.state,
    extract(epoch FROM CASE WHEN isfinite(m.expires_at) THEN m.expires_at - now() END)::float8,
    m.queue, m.lane
