-- The newest `cap` live messages, those that were enqueued since a time: by slots of that time and by name, that of their
-- queue or with `by` = 'topic' of their topic.
SELECT
    date_bin(make_interval(secs => %(width)s::float8), live.created_at, 'epoch') AS created_slot,
    CASE %(by)s::text WHEN 'topic' THEN live.topic ELSE live.queue END AS name,
    count(*) AS messages
FROM (
    SELECT m.created_at, m.topic, m.queue
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('pending', 'sending')
    ORDER BY m.id DESC
    LIMIT %(cap)s::bigint
) AS live
WHERE live.created_at >= %(since)s::timestamptz
GROUP BY 1, 2
