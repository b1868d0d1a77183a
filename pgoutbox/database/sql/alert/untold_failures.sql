-- The alerts that today's and the last week's failed messages call for: for each topic and cause of today, in UTC, and for
-- each earlier day with all of its causes. Each has a dedupe key with its date, so it is sent once. The causes have
-- neither addresses nor quoted values.
WITH today AS MATERIALIZED (
    SELECT date_trunc('day', now(), 'UTC') AS began_at
), failed AS MATERIALIZED (
    SELECT m.id, m.topic, m.last_error, date_trunc('day', m.finished_at, 'UTC') AS day
    FROM pgoutbox.message AS m
    CROSS JOIN today AS t
    WHERE m.state = 'failed'
        AND m.topic <> 'pgoutbox.alert'
        AND m.finished_at >= t.began_at - interval '7 days'
    ORDER BY m.id DESC
    LIMIT %(cap)s::bigint
), stored AS MATERIALIZED (
    SELECT
        f.day,
        f.topic,
        pgoutbox._redacted_text(pgoutbox._cause_of(f.last_error)) AS cause,
        count(*) AS messages,
        max(f.id) AS newest_id
    FROM failed AS f
    GROUP BY f.day, f.topic, pgoutbox._cause_of(f.last_error)
), groups AS (
    SELECT
        s.day,
        s.topic,
        s.cause,
        pgoutbox._error_group(s.topic, s.cause) AS error_group,
        sum(s.messages)::bigint AS messages,
        max(s.newest_id) AS newest_id
    FROM stored AS s
    GROUP BY s.day, s.topic, s.cause
)
SELECT
    concat_ws(' ', 'failed', to_char(g.day AT TIME ZONE 'UTC', 'YYYY-MM-DD'), g.error_group) AS dedupe_key,
    jsonb_build_object(
        'event', 'failed', 'topic', g.topic, 'cause', g.cause, 'group', g.error_group, 'messages', g.messages,
        'newest_id', g.newest_id
    )::text AS payload,
    g.newest_id
FROM groups AS g
JOIN today AS t ON t.began_at = g.day
UNION ALL
SELECT
    'failed on ' || to_char(g.day AT TIME ZONE 'UTC', 'YYYY-MM-DD'),
    jsonb_build_object(
        'event', 'failed_on_day',
        'day', to_char(g.day AT TIME ZONE 'UTC', 'YYYY-MM-DD'),
        'messages', sum(g.messages),
        'causes', jsonb_agg(
            jsonb_build_object(
                'topic', g.topic, 'cause', g.cause, 'group', g.error_group, 'messages', g.messages,
                'newest_id', g.newest_id
            )
            ORDER BY g.messages DESC, g.topic, g.cause
        )
    )::text,
    max(g.newest_id)
FROM groups AS g
JOIN today AS t ON t.began_at > g.day
GROUP BY g.day
ORDER BY newest_id DESC
