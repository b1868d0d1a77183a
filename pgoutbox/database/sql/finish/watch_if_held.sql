-- One row per attempt that still holds its message, with the reasons to stop it.
-- The fence is the state, the attempt count and the worker. The count alone is not enough: a failover that loses
-- commits gives the same attempt number out a second time, to another worker.
SELECT
    m.id,
    EXISTS (SELECT FROM pgoutbox.cancel_request AS r WHERE r.message_id = m.id) AS cancelled,
    head.newest_id IS NOT NULL AS superseded,
    (c.lease_expires_at > now()) IS TRUE AS in_lease
FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS a(id, attempt_count)
-- ANY keeps PostgreSQL from reading the whole primary key, see finish_if_held.sql.
JOIN pgoutbox.message_live AS m ON m.id = a.id AND m.id = ANY (%(ids)s::bigint[])
LEFT JOIN pgoutbox.claim AS c ON c.worker = m.worker AND c.claimed_at = m.claimed_at
LEFT JOIN pgoutbox.key_head AS head
    ON head.scope = m.topic AND head.key = m.coalesce_key AND head.newest_id > m.id
WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count AND m.worker = %(worker)s::text
