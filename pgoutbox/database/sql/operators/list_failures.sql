-- Failed messages by topic and cause, those with the most failures in the last hour first. Only the newest `cap` failed
-- messages are read, because the view redacts each error; `seconds` is the time within which they failed, or null.
WITH failed AS MATERIALIZED (
    SELECT newest.id, newest.topic, newest.cause, newest.last_error, newest.error_place, newest.finished_at
    FROM pgoutbox.message_view AS newest
    WHERE newest.state = 'failed'
        AND (%(topic)s::text IS NULL OR newest.topic = %(topic)s::text)
        AND (
            %(seconds)s::float8 IS NULL
            OR newest.finished_at > now() - make_interval(secs => %(seconds)s::float8)
        )
    ORDER BY newest.id DESC
    LIMIT %(cap)s::bigint
), groups AS (
    SELECT
        m.topic,
        m.cause,
        \ir _group_of.sql
        AS error_group,
        count(*) AS messages,
        count(*) FILTER (WHERE m.finished_at > now() - interval '1 hour') AS last_hour,
        min(m.finished_at) AS first_at,
        max(m.finished_at) AS last_at,
        max(m.id) AS newest_id
    FROM failed AS m
    GROUP BY m.topic, m.cause
)
SELECT
    g.topic,
    g.cause,
    g.error_group,
    g.messages,
    g.last_hour,
    g.first_at,
    g.last_at,
    g.newest_id,
    left(newest.last_error, 300) AS error,
    newest.error_place AS place,
    count(*) OVER () AS group_count,
    (sum(g.messages) OVER ())::bigint AS message_count
FROM groups AS g
JOIN failed AS newest ON newest.id = g.newest_id
ORDER BY g.last_hour DESC, g.messages DESC, g.topic, g.cause
LIMIT %(limit)s::bigint
