-- One row per attempt that still holds its message, with the reasons to stop it.
SELECT
    m.id,
    EXISTS (
        SELECT FROM pgoutbox.cancel_request AS r WHERE r.message_id = m.id AND r.message_created_at = m.created_at
    ) AS cancelled,
    head.newest_id IS NOT NULL AS superseded,
    (c.lease_expires_at > now()) IS TRUE AS in_lease
FROM pgoutbox.message_live AS m
LEFT JOIN pgoutbox.claim AS c ON c.worker = m.worker AND c.claimed_at = m.claimed_at
LEFT JOIN pgoutbox.key_head AS head
    ON head.scope = m.topic AND head.key = m.coalesce_key AND head.newest_id > m.id
WHERE m.id = ANY (%(ids)s::bigint[])
    \ir _fence.sql
