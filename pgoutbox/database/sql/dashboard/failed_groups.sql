-- Groups of failed messages with one topic and error, from the newest `cap` failed messages.
SELECT
    grouped.topic,
    grouped.error,
    -- The filter of a search for the group's messages; ../operators/_matches.sql computes the same.
    left(encode(sha256(convert_to(grouped.topic || E'\n' || grouped.error, 'UTF8')), 'hex'), 32) AS error_group,
    grouped.messages,
    grouped.first_at,
    grouped.last_at,
    grouped.newest_id
FROM (
    SELECT
        m.topic,
        \ir _folded_error.sql
        AS error,
        count(*) AS messages,
        min(m.finished_at) AS first_at,
        max(m.finished_at) AS last_at,
        max(m.id) AS newest_id
    FROM (
        SELECT newest.id, newest.topic, newest.last_error, newest.finished_at
        FROM pgoutbox.message_view AS newest
        WHERE newest.state = 'failed'
        ORDER BY newest.id DESC
        LIMIT %(cap)s::bigint
    ) AS m
    GROUP BY 1, 2
) AS grouped
ORDER BY grouped.messages DESC, grouped.topic, grouped.error
LIMIT %(limit)s::bigint
