-- Finished messages by minute, read from block ranges. The latency of a sent message counts from its due time, or from
-- its enqueue if it was tried again and the due time is no longer known. `bucket` is its logarithm: buckets grow by a
-- twelfth of a power of two.
SELECT
    done.minute,
    done.state,
    done.bucket,
    count(*) AS messages
FROM (
    SELECT
        date_bin('1 minute', m.finished_at, 'epoch') AS minute,
        m.state,
        CASE
            WHEN m.state = 'sent' THEN floor(
                12 / ln(2::float8) * ln(
                    greatest(
                        0.0001,
                        date_part(
                            'epoch',
                            m.finished_at - CASE WHEN m.attempt_count = 1 THEN m.available_at ELSE m.created_at END
                        )
                    )
                )
            )::integer
        END AS bucket
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('sent', 'skipped', 'cancelled')
        AND m.finished_at >= %(from)s::timestamptz
        AND m.finished_at < %(to)s::timestamptz
) AS done
GROUP BY done.minute, done.state, done.bucket
