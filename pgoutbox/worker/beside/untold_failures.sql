-- The alerts that the failed messages of today and of seven days before call for, in UTC: one for each topic and cause of
-- today, and one for each earlier day with all of its causes. Each has a dedupe key with its day, so it is sent once.
WITH groups AS MATERIALIZED (
    SELECT
        ago.days = 0 AS is_of_today,
        to_char(day.began_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day,
        f.error_group,
        f.newest_id,
        f.messages,
        jsonb_build_object(
            'topic', f.topic, 'cause', f.cause, 'group', f.error_group, 'messages', f.messages, 'newest_id', f.newest_id
        ) AS facts
    FROM generate_series(0, 7) AS ago(days)
    CROSS JOIN LATERAL (SELECT date_trunc('day', now(), 'UTC') - ago.days * interval '24 hours' AS began_at) AS day
    CROSS JOIN LATERAL pgoutbox.failures(
        since => day.began_at, until => day.began_at + interval '24 hours', newest => %(cap)s::bigint
    ) AS f
    -- A failed alert calls for no alert.
    WHERE f.topic <> 'pgoutbox.alert'
)
SELECT
    concat_ws(' ', 'failed', g.day, g.error_group) AS dedupe_key,
    (g.facts || '{"event": "failed"}')::text AS payload,
    g.newest_id
FROM groups AS g
WHERE g.is_of_today
UNION ALL
SELECT
    'failed on ' || g.day,
    jsonb_build_object(
        'event', 'failed_on_day',
        'day', g.day,
        'messages', sum(g.messages),
        'causes', jsonb_agg(g.facts ORDER BY g.messages DESC, g.error_group)
    )::text,
    max(g.newest_id)
FROM groups AS g
WHERE NOT g.is_of_today
GROUP BY g.day
ORDER BY newest_id DESC
