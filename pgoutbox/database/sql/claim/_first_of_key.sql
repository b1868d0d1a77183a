-- The first message of the ordering key `v.ordering_key`.
CROSS JOIN LATERAL (
    SELECT m.id, m.topic, m.available_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text AND m.ordering_key = v.ordering_key
    ORDER BY m.id
    LIMIT 1
) AS first
