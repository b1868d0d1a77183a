-- Renew the leases of attempts. One row per attempt that still holds its message, with the reasons to stop it.
-- The fence is the state, the attempt count and the worker. The count alone is not enough: a failover that loses
-- commits gives the same attempt number out a second time, to another worker.
WITH asked(id, attempt_count) AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[])
), locked AS MATERIALIZED (
    SELECT m.id, m.attempt_count
    FROM asked AS a
    JOIN pgoutbox.message_live AS m ON m.id = a.id
    WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count AND m.worker = %(worker)s::text
    -- A transaction that cancels a message keeps its row locked; do not wait for it.
    FOR UPDATE OF m SKIP LOCKED
), renewed AS (
    UPDATE pgoutbox.message_live AS m
    SET lease_expires_at = now() + make_interval(secs => %(lease_seconds)s::float8)
    FROM locked AS l
    WHERE m.id = l.id AND m.state = 'sending' AND m.attempt_count = l.attempt_count
    RETURNING m.id
), beside AS (
    -- The lease of a locked row is renewed in the table `renewal`, unless it has lapsed. Otherwise another worker might
    -- claim the message after the end of that transaction, before this worker writes the outcome.
    INSERT INTO pgoutbox.renewal (message_id, attempt_count, worker, lease_expires_at)
    SELECT m.id, m.attempt_count, m.worker, now() + make_interval(secs => %(lease_seconds)s::float8)
    FROM asked AS a
    JOIN pgoutbox.message_live AS m ON m.id = a.id
    WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count AND m.worker = %(worker)s::text
        AND m.id <> ALL (ARRAY(SELECT l.id FROM locked AS l))
        AND greatest(m.lease_expires_at, pgoutbox._renewed_until(m.id, m.attempt_count, m.worker)) > now()
    ON CONFLICT ON CONSTRAINT renewal_pkey DO UPDATE
    SET attempt_count = excluded.attempt_count,
        worker = excluded.worker,
        lease_expires_at = excluded.lease_expires_at
    RETURNING message_id
)
SELECT
    m.id,
    m.cancel_requested_at IS NOT NULL AS cancelled,
    head.newest_id IS NOT NULL AS superseded,
    r.id IS NOT NULL OR b.message_id IS NOT NULL OR m.lease_expires_at > now() AS in_lease
FROM asked AS a
JOIN pgoutbox.message_live AS m ON m.id = a.id
LEFT JOIN pgoutbox.coalesce_head AS head
    ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
LEFT JOIN renewed AS r ON r.id = m.id
LEFT JOIN beside AS b ON b.message_id = m.id
WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count AND m.worker = %(worker)s::text
