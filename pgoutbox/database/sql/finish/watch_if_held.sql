-- The same answer as renew_if_held.sql without the write: one row per attempt that still holds its message.
SELECT
    m.id,
    m.cancel_requested_at IS NOT NULL AS cancelled,
    head.newest_id IS NOT NULL AS superseded,
    greatest(m.lease_expires_at, pgoutbox._renewed_until(m.id, m.attempt_count, m.worker)) > now() AS in_lease
FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS a(id, attempt_count)
JOIN pgoutbox.message_live AS m ON m.id = a.id
LEFT JOIN pgoutbox.coalesce_head AS head
    ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count AND m.worker = %(worker)s::text
