-- The acts of operators, newest first, up to `limit` before the id `before_id`.
SELECT
    a.id,
    a.act_id,
    a.acted_at,
    a.actor,
    a.origin,
    a.db_role,
    a.action,
    a.queue,
    a.message_count,
    a.message_ids[1:20] AS first_ids,
    a.details,
    a.stated
FROM pgoutbox.audit AS a
-- A batch may have many ids, of which only 20 are returned, so the acts on one message are selected by its id.
WHERE (%(message_id)s::bigint IS NULL OR a.message_ids @> ARRAY[%(message_id)s::bigint])
    AND (%(actor)s::text IS NULL OR a.actor = %(actor)s::text)
    AND (%(action)s::text IS NULL OR a.action = %(action)s::text)
    AND (%(before_id)s::bigint IS NULL OR a.id < %(before_id)s::bigint)
ORDER BY a.id DESC
LIMIT %(limit)s::bigint
