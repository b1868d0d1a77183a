-- One step of the search for the first id enqueued at a given time: the first message from `id` on.
SELECT m.id, m.created_at
FROM pgoutbox.message_view AS m
WHERE m.id >= %(id)s::bigint
ORDER BY m.id
LIMIT 1
