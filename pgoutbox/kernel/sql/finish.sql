-- Finish attempts with any outcome: sent, retry, snoozed, released, failed or skipped. The worker runs it. Returns the
-- new state of each message that its attempt still held. A locked row is left out and tried again later: one row never
-- delays a batch.
-- The same statement enqueues the message for the hook of a message that fails, so that no failure is without one.
-- With a `held_delay`, an outcome adds the hold of its message to its open breaker. Then the message waits unclaimed like
-- all others of the hold, and is due after that delay. Without such an outcome, the parts `holds` are left out.
WITH
-- [holds
opened AS MATERIALIZED (
    -- A breaker that has closed meanwhile has no row. A locked one is left out.
    SELECT b.key, b.holds
    FROM pgoutbox.breaker AS b
    WHERE b.key = ANY (%(breaker_keys)s::text[])
    FOR UPDATE SKIP LOCKED
),
-- holds]
held AS MATERIALIZED (
    SELECT
        o.id, m.attempt_count, o.outcome, o.reason, o.reason_code, o.breaker_key, o.error_place,
        -- [holds
        breaker.holds, pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) AS hold,
        -- Without the row of its breaker, a message is tried again in a few seconds: then it joins the hold, or the
        -- breaker has closed. Not at once: while another session has locked the row, that would be a loop.
        CASE
            WHEN o.held_delay IS NULL THEN o.delay_seconds
            WHEN breaker.key IS NULL THEN o.held_delay + 5
            ELSE o.held_delay
        END AS delay_seconds,
        -- holds]
        -- [no holds
        o.delay_seconds,
        -- no holds]
        head.newest_id AS newer_id,
        CASE
            -- A message that would become pending again ends instead if it was cancelled or superseded, or has no
            -- attempt left.
            WHEN o.outcome IN ('sent', 'failed', 'skipped') THEN o.outcome
            WHEN EXISTS (
                SELECT FROM pgoutbox.cancel_request AS c WHERE c.message_id = m.id AND c.message_created_at = m.created_at
            ) THEN 'cancelled'
            WHEN head.newest_id IS NOT NULL THEN 'skipped'
            WHEN o.outcome = 'retry' AND m.attempt_count >= m.max_attempts THEN 'failed'
            -- The topic does not wait for workers of another version, which may be able to read the payload.
            WHEN o.fails_after = 0 THEN 'failed'
            -- Postponed for this reason for too long, counted from the first of its attempts in a row, and at least ten
            -- times with this one: if all workers stop for an hour, the next attempt must not be the last. Those before
            -- a redrive do not count, because it changes the outcome of their entry.
            WHEN (m.attempts #>> '{-1,outcome}', m.attempts #>> '{-1,reason_code}') = ('snoozed', o.reason_code)
                AND (m.attempts #>> '{-1,times}')::integer >= 9
                AND (m.attempts #>> '{-1,started_at}')::timestamptz <= now() - make_interval(secs => o.fails_after)
                THEN 'failed'
            ELSE 'pending'
        END AS state
    FROM unnest(
        %(ids)s::bigint[], %(outcomes)s::text[], %(reasons)s::text[], %(reason_codes)s::text[],
        %(breaker_keys)s::text[], %(error_places)s::text[], %(delays)s::float8[], %(fails_after)s::float8[],
        %(held_delays)s::float8[]
    ) AS o(id, outcome, reason, reason_code, breaker_key, error_place, delay_seconds, fails_after, held_delay)
    -- [holds
    LEFT JOIN opened AS breaker ON breaker.key = o.breaker_key AND o.held_delay IS NOT NULL
    -- holds]
    -- The ANY below and in `finished` say again what the join says. Without them, PostgreSQL may plan to read the whole
    -- primary key, because statistics may describe an empty table.
    JOIN pgoutbox.message_live AS m ON m.id = o.id
    -- The newer message that supersedes this one. It matters only if this one would become pending again.
    LEFT JOIN LATERAL (
        SELECT h.newest_id FROM pgoutbox.key_head AS h
        WHERE h.scope = m.topic AND h.key = m.coalesce_key AND h.newest_id > m.id LIMIT 1
    ) AS head ON true
    WHERE m.id = ANY (%(ids)s::bigint[])
        -- The fence: an attempt may write its row while the row is in flight in this attempt.
        AND m.state = 'sending'
        -- The last attempt of the row is this one: it has its number, worker and claim. After a failover that loses commits,
        -- another message may get the same id, and the same worker may claim it with the same number: only the time of the claim
        -- tells the two attempts apart. `ids` is sorted, so width_bucket finds the place of an attempt without a join.
        AND m.worker = %(worker)s::text
        AND m.attempt_count = (%(attempt_counts)s::integer[])[width_bucket(m.id, %(ids)s::bigint[])]
        AND m.claimed_at = (%(claimed_ats)s::timestamptz[])[width_bucket(m.id, %(ids)s::bigint[])]
    -- While its lease runs, only this worker writes a message in flight. A session that has locked its row for another
    -- reason must not delay the batch.
    FOR UPDATE OF m SKIP LOCKED
),
-- [holds
noted AS (
    UPDATE pgoutbox.breaker AS b
    SET holds = b.holds || added.holds
    FROM (
        SELECT h.breaker_key, array_agg(DISTINCT h.hold) AS holds
        FROM held AS h
        WHERE h.state = 'pending' AND h.hold <> ALL (h.holds)
        GROUP BY h.breaker_key
    ) AS added
    -- By its key and not by the place of its row, which may have changed since this statement's snapshot.
    WHERE b.key = added.breaker_key
),
-- holds]
finished AS (
    UPDATE pgoutbox.message AS m
    SET state = h.state,
        available_at = CASE
            -- A released message keeps its due time.
            WHEN h.state = 'pending' AND h.outcome <> 'released' THEN now() + make_interval(secs => h.delay_seconds)
            ELSE m.available_at
        END,
        key_in_flight = NULL,
        lane = CASE WHEN m.fair_key IS NULL THEN 1 ELSE 2 END,
        finished_at = CASE WHEN h.state <> 'pending' THEN now() END,
        -- Snooze and release do not use up an attempt: they raise the limit, because the attempt count, the fence,
        -- never goes down.
        max_attempts = m.max_attempts + CASE WHEN h.outcome IN ('snoozed', 'released') THEN 1 ELSE 0 END,
        skip_reason = CASE
            WHEN h.state <> 'skipped' THEN NULL
            WHEN h.outcome = 'skipped' THEN h.reason
            ELSE 'superseded by ' || h.newer_id
        END,
        superseded_by = CASE WHEN h.state = 'skipped' AND h.outcome <> 'skipped' THEN h.newer_id END,
        last_error = CASE
            WHEN h.outcome IN ('retry', 'failed') THEN h.reason
            WHEN h.outcome = 'snoozed' THEN coalesce(h.reason, m.last_error)
            ELSE m.last_error
        END,
        -- The message itself shows its sent attempt.
        attempts = CASE
            WHEN h.state = 'sent' THEN m.attempts
            -- The columns are attempt_count, times, outcome, worker, started_at, ended_at, error, error_place, reason_code
            -- and breaker_key.
            ELSE pgoutbox._with_attempt(m.attempts, (
                h.attempt_count, 1, CASE WHEN h.state = 'pending' THEN h.outcome ELSE h.state END, m.worker,
                m.claimed_at, now(), h.reason, h.error_place, h.reason_code, h.breaker_key
            )::pgoutbox.attempt)
        END
    FROM held AS h
    -- By its id: `held` has locked the newest version of the row. At its place, this statement's snapshot does not see a
    -- version that is newer than itself, but the outcome of an attempt is written all the same.
    WHERE m.id = h.id
        AND m.id = ANY (%(ids)s::bigint[])
        AND m.state = 'sending'
    RETURNING m.id, m.state,
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
SELECT f.id, f.state
FROM finished AS f
-- The outer join makes PostgreSQL run the CTE, which is a SELECT.
LEFT JOIN announced AS a ON a.id = f.id
