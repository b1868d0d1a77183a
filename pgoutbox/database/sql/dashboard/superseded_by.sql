-- The messages that a message superseded. They have slightly smaller ids; there is no index for this direction.
SELECT m.id
FROM (
    SELECT near.id, near.superseded_by
    FROM pgoutbox.message_view AS near
    WHERE near.state IN ('sent', 'skipped', 'cancelled') AND near.id < %(id)s::bigint
    ORDER BY near.id DESC
    LIMIT %(rows)s::bigint
) AS m
WHERE m.superseded_by = %(id)s::bigint
ORDER BY m.id DESC
LIMIT %(limit)s::bigint
