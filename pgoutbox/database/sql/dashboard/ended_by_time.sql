-- The ended messages of a queue by their times of end and of enqueue.
SELECT
    date_bin(make_interval(secs => %(width)s::float8), m.finished_at, 'epoch') AS slot,
    date_bin(make_interval(secs => %(width)s::float8), m.created_at, 'epoch') AS created_slot,
    count(*) AS messages
FROM pgoutbox.message_view AS m
WHERE m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    AND m.queue = %(queue)s::text
    AND m.finished_at >= %(from)s::timestamptz
    AND m.finished_at < %(to)s::timestamptz
GROUP BY 1, 2
