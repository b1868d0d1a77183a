-- Attempts whose lease has lapsed, and their decision: the message ends as cancelled, skipped or failed, or `sending`
-- because it is tried again. The including statement adds conditions, an order, a limit and row locks.
SELECT m.ctid AS place, m.id, m.attempt_count, m.worker, m.claimed_at, head.newest_id AS newer_id,
    coalesce(ending.state, 'sending') AS state
FROM pgoutbox.message_live AS m
-- The newer message of the same key that supersedes this one.
LEFT JOIN pgoutbox.coalesce_head AS head
    ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN m.cancel_requested_at IS NOT NULL THEN 'cancelled'
        WHEN head.newest_id IS NOT NULL OR m.expires_at <= now() THEN 'skipped'
        -- hold_topics: topics that hold a message with an unknown outcome for a person instead of trying it again.
        WHEN m.attempt_count >= m.max_attempts OR m.topic = ANY (%(hold_topics)s::text[]) THEN 'failed'
    END
) AS ending(state)
WHERE m.state = 'sending'
    AND m.lease_expires_at <= now()
    -- clock_limit: beyond this time no lease counts as lapsed. After the server's clock has stepped forward, live
    -- workers need time to renew their leases.
    AND now() <= coalesce(%(clock_limit)s::timestamptz, 'infinity')
    -- A lease is also renewed in the table renewal, while another transaction has locked the message's row.
    AND greatest(m.lease_expires_at, pgoutbox._renewed_until(m.id, m.attempt_count, m.worker)) <= now()
    AND m.topic = ANY (%(topics)s::text[])
    AND m.id <> ALL (%(set_aside)s::bigint[])
    -- in_flight: the attempts of this worker. After a suspension or an outage it renews their leases instead.
    -- Other attempts in its name are lost, for example by a failover.
    AND (m.worker <> %(worker)s::text OR m.id <> ALL (%(in_flight)s::bigint[]))
