-- Sent messages by ten minutes, read from the block ranges of the partitions of that time.
SELECT date_bin('10 minutes', m.finished_at, 'epoch') AS slot, count(*) AS messages
FROM pgoutbox.message_view AS m
WHERE m.state = 'sent'
    AND m.finished_at >= %(from)s::timestamptz
    AND m.finished_at < %(to)s::timestamptz
GROUP BY 1
