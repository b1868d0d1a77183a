-- Attempts whose lease has lapsed, and their decision: the message ends as cancelled, skipped or failed, or is
-- `pending` again, or it is `sending`: tried again at once and alone. The including statement adds conditions, an order,
-- a limit and row locks. The lock of the claim looks again at its newest lease. It is the lock of a renewal, so that a
-- session that keeps the worker from renewing also keeps others from taking its attempts. The joins are those of
-- in_flight_view, whose rows cannot be locked.
SELECT m.ctid AS place, m.id, m.attempt_count, m.worker, m.claimed_at, head.newest_id AS newer_id, ending.state
FROM pgoutbox.claim AS c
-- Without ANY, the planner may read the whole table once instead of looking up each message.
JOIN pgoutbox.message_live AS m ON m.id = ANY (c.ids) AND m.worker = c.worker AND m.claimed_at = c.claimed_at
-- The newer message of the same key that supersedes this one.
LEFT JOIN pgoutbox.key_head AS head
    ON head.scope = m.topic AND head.key = m.coalesce_key AND head.newest_id > m.id
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN EXISTS (
            SELECT FROM pgoutbox.cancel_request AS r WHERE r.message_id = m.id AND r.message_created_at = m.created_at
        ) THEN 'cancelled'
        WHEN head.newest_id IS NOT NULL OR m.expires_at <= now() THEN 'skipped'
        -- hold_topics: topics that hold a message with an unknown outcome for a person instead of trying it again.
        WHEN m.attempt_count >= m.max_attempts OR m.topic = ANY (%(hold_topics)s::text[]) THEN 'failed'
        -- It cannot afford another loss: half of its granted attempts are used up.
        WHEN m.max_attempts - m.attempt_count <= m.attempt_budget / 2 THEN 'sending'
        -- Nor can another message that its worker had in flight, and that was lost twice in a row. Either of them may have
        -- crashed the process. If this one were not tried alone too, they could meet again. The array is read once.
        WHEN c.worker = ANY (ARRAY(
            SELECT o.worker
            FROM pgoutbox.claim AS o
            JOIN pgoutbox.message_live AS s ON s.id = ANY (o.ids) AND s.worker = o.worker AND s.claimed_at = o.claimed_at
            WHERE o.worker IN (SELECT l.worker FROM pgoutbox.claim AS l WHERE l.lease_expires_at <= now())
                AND s.state = 'sending'
                AND s.max_attempts - s.attempt_count BETWEEN 1 AND s.attempt_budget / 2
                AND s.attempts #>> '{-1,outcome}' = 'lost'
        )) THEN 'sending'
        ELSE 'pending'
    END
) AS ending(state)
WHERE m.state = 'sending'
    AND c.lease_expires_at <= now()
    -- A released attempt first gets the lease of its worker: see forget_lapsed.sql.
    AND coalesce(c.released_from, '') = ''
    AND m.topic = ANY (%(topics)s::text[])
    -- in_flight: the attempts of this worker. After a suspension or an outage it renews their leases instead.
    -- Other attempts in its name are lost, for example by a failover.
    AND (m.worker <> %(worker)s::text OR m.id <> ALL (%(in_flight)s::bigint[]))
