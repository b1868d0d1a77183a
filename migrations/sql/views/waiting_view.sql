-- Every pending message with the reason why it is not claimed: superseded, paused, scheduled, retry, breaker,
-- unavailable, redirect, unreadable, halted, in order, in flight, rate, max_in_flight, share, no worker, no handler, next run,
-- turn, or due if it can be claimed. handled_as is the name that a worker of its queue must have for it: its topic, with a
-- later version of its payload, such as mail.welcome@2.
--
-- A message with a fair key waits for a turn of its key. With the reason share the key gets none, and cap says why: paused,
-- its limit such as 5 in flight, or its rate such as 100 in 60 s.
--
-- A superseded message is never delivered, whatever else it waits for. The other reasons have the order of the claim's
-- checks. Some come from the reason code of the last attempt; the other reasons follow from the rows. A run of `worker
-- --once` serves its queues and topics until the next one, for 25 hours, which is a daily run and an hour. Messages behind
-- an open breaker wait for it even if they were never attempted.
CREATE VIEW pgoutbox.waiting_view AS
WITH control AS MATERIALIZED (
    SELECT q.name, q.is_paused, q.resume_at, q.tokens, q.next_token_at, q.max_in_flight, q.in_flight
    FROM pgoutbox.queue_view AS q
), serving AS MATERIALIZED (
    SELECT DISTINCT served.queue, w.topics, w.ended_at IS NULL AS is_running
    FROM pgoutbox.worker_view AS w
    CROSS JOIN LATERAL unnest(w.queues) AS served(queue)
    WHERE w.ended_at IS NULL OR w.ended_at > now() - interval '25 hours'
), held AS MATERIALIZED (
    SELECT h.hold, max(greatest(b.retry_at, b.probe_until)) AS probe_at
    FROM pgoutbox.breaker AS b
    CROSS JOIN LATERAL unnest(b.holds) AS h(hold)
    GROUP BY h.hold
), turns AS MATERIALIZED (
    -- Few: the messages that workers have room for.
    SELECT a.queue, a.fair_key, count(*) AS in_flight
    FROM pgoutbox.message_live AS a
    WHERE a.fair_key IS NOT NULL AND a.lane < 2
    GROUP BY a.queue, a.fair_key
)
SELECT
    m.id,
    m.topic,
    m.queue,
    pgoutbox._redacted_text(m.destination) AS destination,
    m.attempt_count,
    m.created_at,
    m.available_at,
    why.reason,
    CASE why.reason
        WHEN 'superseded' THEN head.newest_id
        WHEN 'halted' THEN halt.id
        WHEN 'in order' THEN earlier.id
        WHEN 'in flight' THEN sibling.id
    END AS waits_for,
    CASE why.reason
        WHEN 'superseded' THEN NULL
        WHEN 'paused' THEN nullif(
            -- If its queue and its topic are paused, it waits for both. A pause without an end lasts until it is resumed.
            greatest(
                CASE WHEN control.is_paused THEN coalesce(control.resume_at, 'infinity') END,
                CASE WHEN pause.topic IS NOT NULL THEN coalesce(pause.resume_at, 'infinity') END
            ),
            'infinity'
        )
        WHEN 'breaker' THEN greatest(m.available_at, held.probe_at)
        WHEN 'rate' THEN control.next_token_at
        WHEN 'share' THEN CASE WHEN share.permit_at > now() THEN share.permit_at END
        ELSE CASE WHEN m.available_at > now() THEN m.available_at END
    END AS until,
    handled.name AS handled_as,
    m.fair_key,
    CASE
        WHEN why.reason <> 'share' THEN NULL
        WHEN share.is_paused THEN 'paused'
        WHEN share.permit_at > now() THEN given.rate_count || ' in ' || given.rate_seconds || ' s'
        ELSE given.max_in_flight || ' in flight'
    END AS cap
FROM pgoutbox.message_live AS m
LEFT JOIN held ON held.hold = pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination)
LEFT JOIN control ON control.name = m.queue
LEFT JOIN pgoutbox.topic_pause_view AS pause ON pause.topic = m.topic
LEFT JOIN pgoutbox.key_head AS head
    ON head.scope = m.topic AND head.key = m.coalesce_key AND head.newest_id > m.id
LEFT JOIN LATERAL (
    SELECT f.id
    FROM pgoutbox.message_failed AS f
    WHERE f.queue = m.queue AND f.ordering_key = m.ordering_key AND f.halts_key AND f.id < m.id
    ORDER BY f.id
    LIMIT 1
) AS halt ON m.ordering_key IS NOT NULL
LEFT JOIN LATERAL (
    SELECT e.id
    FROM pgoutbox.message_live AS e
    WHERE e.queue = m.queue AND e.ordering_key = m.ordering_key AND e.id < m.id
    ORDER BY e.id
    LIMIT 1
) AS earlier ON m.ordering_key IS NOT NULL
LEFT JOIN LATERAL (
    SELECT s.id
    FROM pgoutbox.message_live AS s
    WHERE s.topic = m.topic AND s.key_in_flight = m.coalesce_key AND s.ordering_key IS NULL AND s.id <> m.id
    UNION ALL
    -- A message that was redriven may be the first of its key while a later one is in flight.
    SELECT s.id
    FROM pgoutbox.message_live AS s
    WHERE s.queue = m.queue AND s.key_in_flight = m.ordering_key AND s.ordering_key IS NOT NULL AND s.id <> m.id
    LIMIT 1
) AS sibling ON m.coalesce_key IS NOT NULL OR m.ordering_key IS NOT NULL
LEFT JOIN pgoutbox.fair_share AS own ON m.lane = 2 AND own.queue = m.queue AND own.fair_key = m.fair_key
LEFT JOIN pgoutbox.fair_share AS common ON m.lane = 2 AND common.queue = m.queue AND common.fair_key = ''
LEFT JOIN turns ON m.lane = 2 AND turns.queue = m.queue AND turns.fair_key = m.fair_key
CROSS JOIN LATERAL (
    SELECT
        coalesce(own.weight, common.weight, 1) AS weight,
        coalesce(own.max_in_flight, common.max_in_flight) AS max_in_flight,
        CASE WHEN own.rate_count IS NULL THEN common.rate_count ELSE own.rate_count END AS rate_count,
        CASE WHEN own.rate_count IS NULL THEN common.rate_seconds ELSE own.rate_seconds END AS rate_seconds
) AS given
CROSS JOIN LATERAL (
    -- The conditions of _give_turns.
    SELECT
        given.max_in_flight = 0 AS is_paused,
        coalesce(turns.in_flight, 0) >= given.max_in_flight AS is_full,
        CASE
            WHEN given.max_in_flight IS DISTINCT FROM 0
                THEN own.spent_at - (given.weight - 1) * given.rate_seconds * interval '1 s' / given.rate_count
        END AS permit_at
) AS share
CROSS JOIN LATERAL (SELECT m.attempts #>> '{-1,reason_code}') AS last_attempt(reason_code)
CROSS JOIN LATERAL (SELECT pgoutbox._handled_as(m.topic, m.payload_version)) AS handled(name)
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN head.newest_id IS NOT NULL THEN 'superseded'
        WHEN control.is_paused OR pause.topic IS NOT NULL THEN 'paused'
        WHEN m.available_at > now() AND last_attempt.reason_code IN ('circuit_open', 'stalled') THEN 'breaker'
        WHEN m.available_at > now()
            THEN coalesce(last_attempt.reason_code, CASE WHEN m.attempt_count > 0 THEN 'retry' ELSE 'scheduled' END)
        WHEN halt.id IS NOT NULL THEN 'halted'
        WHEN earlier.id IS NOT NULL THEN 'in order'
        WHEN sibling.id IS NOT NULL THEN 'in flight'
        WHEN held.hold IS NOT NULL THEN 'breaker'
        WHEN control.tokens < 1 THEN 'rate'
        WHEN control.in_flight >= control.max_in_flight THEN 'max_in_flight'
        WHEN m.lane = 2 AND (share.is_paused OR share.permit_at > now()) THEN 'share'
        WHEN NOT EXISTS (SELECT FROM serving AS s WHERE s.queue = m.queue) THEN 'no worker'
        WHEN NOT EXISTS (SELECT FROM serving AS s WHERE s.queue = m.queue AND handled.name = ANY (s.topics)) THEN 'no handler'
        WHEN NOT EXISTS (
            SELECT FROM serving AS s WHERE s.queue = m.queue AND handled.name = ANY (s.topics) AND s.is_running
        ) THEN CASE
            -- The next run finds the same, unless something was repaired.
            WHEN last_attempt.reason_code IN ('unavailable', 'redirect', 'unreadable') THEN last_attempt.reason_code
            ELSE 'next run'
        END
        -- Without a worker, those in flight may be lapsed attempts, which a worker ends.
        WHEN m.lane = 2 AND share.is_full THEN 'share'
        WHEN m.lane = 2 THEN 'turn'
        ELSE 'due'
    END AS reason
) AS why
WHERE m.state = 'pending';
