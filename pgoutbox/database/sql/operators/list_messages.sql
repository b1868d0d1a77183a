-- The messages that match the filter, newest first, up to `limit` before the id `before_id`.
SELECT
    \ir _listed.sql
FROM pgoutbox.message_view AS m
WHERE
    \ir _matches.sql
    AND (%(before_id)s::bigint IS NULL OR m.id < %(before_id)s::bigint)
ORDER BY m.id DESC
LIMIT %(limit)s::bigint
