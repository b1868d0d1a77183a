-- Ended messages by slots of `width` seconds, by name (that of their queue, or with `by` = 'topic' of their topic), and by
-- the time of their enqueue. It is at most two hours before their end. Read from the block ranges of the partitions
-- of that time.
SELECT
    date_bin(make_interval(secs => %(width)s::float8), m.finished_at, 'epoch') AS slot,
    CASE %(by)s::text WHEN 'topic' THEN m.topic ELSE m.queue END AS name,
    date_bin(
        make_interval(secs => %(width)s::float8), greatest(m.created_at, m.finished_at - interval '2 hours'), 'epoch'
    ) AS created_slot,
    count(*) AS messages
FROM pgoutbox.message_view AS m
WHERE m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    AND m.finished_at >= %(from)s::timestamptz
    AND m.finished_at < %(to)s::timestamptz
GROUP BY 1, 2, 3
