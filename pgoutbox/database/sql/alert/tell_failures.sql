-- Enqueue an alert for each topic and cause of messages that failed today, in UTC, and one with all causes of yesterday.
-- The dedupe key has the date: however often and wherever workers run this, each alert is sent once a day. One row: the
-- number of new alerts. Only the newest `cap` failed messages are read, because the view redacts each error. The alerts
-- have neither addresses nor quoted values.
WITH today AS MATERIALIZED (
    SELECT date_trunc('day', now(), 'UTC') AS began_at, to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS name
), failed AS MATERIALIZED (
    SELECT m.id, m.topic, m.cause, m.finished_at >= t.began_at AS is_of_today
    FROM pgoutbox.message_view AS m
    CROSS JOIN today AS t
    WHERE m.state = 'failed'
        AND m.topic <> 'pgoutbox.alert'
        AND m.finished_at >= t.began_at - interval '1 day'
    ORDER BY m.id DESC
    LIMIT %(cap)s::bigint
), groups AS (
    SELECT
        m.is_of_today,
        m.topic,
        m.cause,
        \ir ../operators/_group_of.sql
        AS error_group,
        count(*) AS messages,
        max(m.id) AS newest_id
    FROM failed AS m
    GROUP BY m.is_of_today, m.topic, m.cause
    ORDER BY messages DESC, m.topic, m.cause
), alerts AS (
    (
        SELECT
            jsonb_build_object(
                'event', 'failed', 'topic', g.topic, 'cause', g.cause, 'group', g.error_group, 'messages', g.messages,
                'newest_id', g.newest_id
            ) AS payload,
            NULL::text AS coalesce_key,
            concat_ws(' ', 'failed', t.name, g.error_group) AS dedupe_key
        FROM groups AS g
        CROSS JOIN today AS t
        WHERE g.is_of_today
        LIMIT %(limit)s::bigint
    )
    UNION ALL
    SELECT
        jsonb_build_object(
            'event', 'failed_yesterday',
            'messages', sum(g.messages),
            'causes', jsonb_agg(jsonb_build_object(
                'topic', g.topic, 'cause', g.cause, 'group', g.error_group, 'messages', g.messages,
                'newest_id', g.newest_id
            ))
        ),
        NULL,
        'failed before ' || t.name
    FROM groups AS g
    CROSS JOIN today AS t
    WHERE NOT g.is_of_today
    GROUP BY t.name
)
\ir _alerted.sql
