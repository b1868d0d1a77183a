-- End up to `total` lapsed attempts of these queues, and take over up to `suspects` (0 or 1) lapsed suspects. Messages
-- that are pending again fall due one after the other, `distance_seconds` apart, because one of them may have crashed its
-- process and may do so again. A suspect is likely to: its message stays in flight, with its key, in an attempt that this
-- worker begins at once. Like finish.sql, this enqueues the messages for the hooks of messages that fail. The rows have the
-- columns of claim.sql; those in the state `sending` begin.
-- Guards: row locks, and the place of the row in the UPDATE.
WITH judged AS MATERIALIZED (
    -- Attempts whose lease has lapsed, and their decision: the message ends as cancelled, skipped or failed, or is
    -- `pending` again, or it is `sending`: tried again at once and alone. The lock of the claim looks again at its
    -- newest lease. It is the lock of a renewal, so that a session that keeps the worker from renewing also keeps others
    -- from taking its attempts. The joins are those of in_flight_view, whose rows cannot be locked.
    SELECT found.*
    -- Two searches with limits of their own: many ends must not crowd out a suspect.
    FROM (VALUES (false, %(total)s::bigint), (true, %(suspects)s::bigint)) AS kind(is_suspect, most)
    CROSS JOIN LATERAL (
        SELECT m.ctid AS place, m.id, m.attempt_count, m.worker, m.claimed_at, c.queue,
            head.newest_id AS newer_id, ending.state
        FROM pgoutbox.claim AS c
        -- Without ANY, the planner may read the whole table once instead of looking up each message.
        JOIN pgoutbox.message_live AS m ON m.id = ANY (c.ids) AND m.worker = c.worker AND m.claimed_at = c.claimed_at
        -- The newer message of the same key that supersedes this one.
        LEFT JOIN LATERAL (
            SELECT h.newest_id FROM pgoutbox.key_head AS h
            WHERE h.scope = m.topic AND h.key = m.coalesce_key AND h.newest_id > m.id LIMIT 1
        ) AS head ON true
        CROSS JOIN LATERAL (
            SELECT CASE
                WHEN EXISTS (
                    SELECT FROM pgoutbox.cancel_request AS r WHERE r.message_id = m.id AND r.message_created_at = m.created_at
                ) THEN 'cancelled'
                WHEN head.newest_id IS NOT NULL OR m.expires_at <= now() THEN 'skipped'
                -- hold_topics: topics that hold a message with an unknown outcome for a person instead of trying it again.
                WHEN m.attempt_count >= m.max_attempts OR m.topic = ANY (%(hold_topics)s::text[]) THEN 'failed'
                -- It cannot afford another loss in company: half of its granted attempts are used up, and the others
                -- are for attempts alone. Half is a choice: a message that crashes its process ends before it has taken
                -- many others with it. It is rounded down, so a message with one attempt is never a suspect. Enqueue
                -- grants the budget, and each redrive again. A snooze raises both numbers of the difference, and so
                -- changes nothing here.
                WHEN m.max_attempts - m.attempt_count <= m.attempt_budget / 2 THEN 'sending'
                -- Beside it, its worker had a suspect in flight that was lost twice in a row: now, and in the attempt
                -- before. Either message may have crashed the process. If this one were not tried alone too, they could
                -- meet again. The arrays are read once, and a join would read all claims.
                WHEN c.worker = ANY (ARRAY(
                    SELECT o.worker
                    FROM pgoutbox.claim AS o
                    JOIN pgoutbox.message_live AS s ON s.id = ANY (o.ids) AND s.worker = o.worker AND s.claimed_at = o.claimed_at
                    WHERE o.worker = ANY (ARRAY(SELECT l.worker FROM pgoutbox.claim AS l WHERE l.lease_expires_at <= now()))
                        AND s.state = 'sending'
                        AND s.max_attempts - s.attempt_count BETWEEN 1 AND s.attempt_budget / 2
                        AND s.attempts #>> '{-1,outcome}' = 'lost'
                )) THEN 'sending'
                ELSE 'pending'
            END
        ) AS ending(state)
        WHERE m.state = 'sending'
            AND c.lease_expires_at <= now()
            -- The lease of a message that an operator has released is extended first, once: see forget_lapsed.sql.
            AND coalesce(c.released_from, '') = ''
            AND pgoutbox._handled_as(m.topic, m.payload_version) = ANY (%(topics)s::text[])
            -- in_flight: the attempts of this worker. After a suspension or an outage it renews their leases instead.
            -- Other attempts in its name are lost, for example by a failover.
            AND (m.worker <> %(worker)s::text OR m.id <> ALL (%(in_flight)s::bigint[]))
            -- A queue that is paused or has no permit keeps its suspects, and so does a paused topic. _permits() locks the
            -- row of a queue with limits.
            AND CASE
                WHEN kind.is_suspect THEN ending.state = 'sending'
                    AND m.topic <> ALL (ARRAY(SELECT p.topic FROM pgoutbox.topic_pause_view AS p))
                    AND pgoutbox._permits(
                        c.queue, 1,
                        EXISTS (SELECT FROM pgoutbox.queue AS q WHERE q.name = c.queue AND q.rate_count IS NOT NULL OFFSET 0)
                    ) > 0
                ELSE ending.state <> 'sending'
            END
            -- Other queues may no longer have a worker. There only superseded messages end, because a newer message of their
            -- key waits for them.
            AND (c.queue = ANY (%(queues)s::text[]) OR (head.newest_id IS NOT NULL AND NOT kind.is_suspect))
        ORDER BY c.lease_expires_at, m.id
        LIMIT kind.most
        -- Another claim may have locked a row. It is skipped, because a wait would fail with 40001 when the row moves to
        -- another partition. One that has moved since the statement began fails it all the same, and the worker claims again.
        FOR UPDATE OF m SKIP LOCKED
        FOR UPDATE OF c SKIP LOCKED
    ) AS found
), claim AS (
    -- The real time, because a transaction may have several claims.
    INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
    SELECT
        clock_timestamp(), now() + make_interval(secs => %(lease_seconds)s::float8), j.queue, %(worker)s::text, ARRAY[j.id]
    FROM judged AS j
    WHERE j.state = 'sending'
    RETURNING claimed_at, queue
), spent AS (
    UPDATE pgoutbox.queue AS q
    SET tokens = greatest(0, pgoutbox._bucket_of(q, c.claimed_at) - 1),
        tokens_at = greatest(c.claimed_at, q.tokens_at + interval '1 us'),
        begun_count = q.begun_count + 1
    FROM claim AS c
    WHERE q.name = c.queue AND q.rate_count IS NOT NULL
), finished AS (
    UPDATE pgoutbox.message AS m
    SET state = j.state,
        attempt_count = m.attempt_count + CASE WHEN j.state = 'sending' THEN 1 ELSE 0 END,
        claimed_at = CASE WHEN j.state = 'sending' THEN (SELECT c.claimed_at FROM claim AS c) ELSE m.claimed_at END,
        worker = CASE WHEN j.state = 'sending' THEN %(worker)s::text ELSE m.worker END,
        key_in_flight = CASE WHEN j.state = 'sending' THEN m.key_in_flight END,
        lane = 1,
        available_at = CASE
            WHEN j.state = 'pending' THEN now() + make_interval(secs => %(distance_seconds)s::float8 * (j.number - 1))
            ELSE m.available_at
        END,
        finished_at = CASE WHEN j.state NOT IN ('pending', 'sending') THEN now() END,
        skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.newer_id, 'expired') END,
        superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END,
        last_error = 'attempt ' || j.attempt_count || ': lease of ' || j.worker || ' expired, outcome unknown',
        attempts =
            -- The history with the attempt that was lost: attempt_count, times, outcome, worker, started_at, ended_at, error,
            -- error_place, reason_code and breaker_key.
            pgoutbox._with_attempt(m.attempts, (
                j.attempt_count, 1, 'lost', j.worker, j.claimed_at, now(), 'lease expired, outcome unknown', NULL, NULL, NULL
            )::pgoutbox.attempt)
    FROM (
        SELECT *, count(*) FILTER (WHERE state = 'pending') OVER (ROWS UNBOUNDED PRECEDING) AS number
        FROM judged
    ) AS j
    -- `place` is where the row was locked. A row that has changed since this statement's snapshot does not match. The
    -- state restricts the plan to one partition.
    WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'sending'
    RETURNING m.id, m.topic, m.destination,
        CASE WHEN m.state = 'sending' AND pg_column_size(m.payload) <= 16384 THEN m.payload::text END AS payload,
        m.headers::text AS headers, m.attempt_count, m.max_attempts, m.attempt_budget, m.created_at, m.available_at,
        m.coalesce_key, m.ordering_key, m.content_id, m.claimed_at, m.state,
        extract(epoch FROM CASE WHEN isfinite(m.expires_at) THEN m.expires_at - now() END)::float8 AS expires_in_seconds,
        m.queue, m.lane, m.payload_version,
        -- The name of the sessions that attempts of the lost claim share: see end_attempts.sql.
        format(
            'pgoutbox attempts %%s %%s', right(split_part(j.worker, ' (released message ', 1), 8),
            (extract(epoch FROM j.claimed_at) * 1000000)::bigint
        ) AS lost_session,
        -- The payload of the hook's message, for a message that has just failed. Null for every other message, and for topics
        -- without a hook in this worker. A sealed payload stays sealed; who unseals it needs the destination and the keys.
        CASE WHEN m.state = 'failed' AND %(hooks)s::jsonb -> m.topic IS NOT NULL THEN jsonb_build_object(
            'message_id', m.id,
            'topic', m.topic,
            'queue', m.queue,
            'destination', m.destination,
            'owner', m.owner,
            'coalesce_key', m.coalesce_key,
            'ordering_key', m.ordering_key,
            'headers', m.headers,
            'error', m.last_error,
            'attempt_count', m.attempt_count,
            'created_at', m.created_at,
            'failed_at', m.finished_at,
            'payload_version', m.payload_version,
            -- An enqueue refuses more than 16 MiB, and a refused enqueue would keep the message from failing.
            'payload', CASE WHEN octet_length(m.payload::text) <= 16000000 THEN m.payload END
        ) END AS failure
), announced AS MATERIALIZED (
    -- Enqueue one message for the hook of each message that `finished` ended as failed. It commits with the failure. `hooks`
    -- gives the number of its attempts by the topic of the failed message.
    SELECT
        f.id,
        pgoutbox._enqueue_failure(f.failure, (%(hooks)s::jsonb ->> (f.failure ->> 'topic'))::integer) AS hook_id
    FROM finished AS f
    WHERE f.failure IS NOT NULL
)
SELECT f.id, f.topic, f.destination,
    CASE WHEN octet_length(f.payload) <= 16384 THEN f.payload END,
    f.headers, f.attempt_count, f.max_attempts, f.attempt_budget, f.created_at, f.available_at, f.coalesce_key,
    f.ordering_key, f.content_id, f.claimed_at, f.state, f.expires_in_seconds, false, f.queue, f.lost_session, f.lane,
    f.payload_version
FROM finished AS f
-- The outer join makes PostgreSQL run the CTE, which is a SELECT.
LEFT JOIN announced AS a ON a.id = f.id
