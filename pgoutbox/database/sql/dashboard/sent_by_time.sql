-- Sent messages by slots of `width` seconds and by latency, read from the block ranges of the partitions of that time. The
-- latency counts from the due time, or from the enqueue if the message was tried again and the due time is no longer known.
-- `bucket` is its logarithm: buckets grow by a twelfth of a power of two.
SELECT
    date_bin(make_interval(secs => %(width)s::float8), m.finished_at, 'epoch') AS slot,
    floor(
        12 / ln(2::float8) * ln(
            greatest(
                0.0001,
                date_part(
                    'epoch', m.finished_at - CASE WHEN m.attempt_count = 1 THEN m.available_at ELSE m.created_at END
                )
            )
        )
    )::integer AS bucket,
    count(*) AS messages
FROM pgoutbox.message_view AS m
WHERE m.state = 'sent'
    AND m.finished_at >= %(from)s::timestamptz
    AND m.finished_at < %(to)s::timestamptz
GROUP BY 1, 2
