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
LEFT JOIN LATERAL (
    SELECT h.newest_id FROM pgoutbox.key_head AS h
    WHERE h.scope = m.topic AND h.key = m.coalesce_key AND h.newest_id > m.id LIMIT 1
) AS head ON true
WHERE m.id = ANY (%(ids)s::bigint[])
    \ir _fence.sql
