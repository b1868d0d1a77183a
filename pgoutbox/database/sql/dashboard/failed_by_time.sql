-- Failed messages by time, the newest `cap` at most.
SELECT date_bin(make_interval(secs => %(width)s::float8), failed.finished_at, 'epoch') AS slot, count(*) AS messages
FROM (
    SELECT m.finished_at
    FROM pgoutbox.message_view AS m
    WHERE m.state = 'failed' AND m.finished_at >= %(from)s::timestamptz
    ORDER BY m.finished_at DESC
    LIMIT %(cap)s::bigint
) AS failed
GROUP BY 1
