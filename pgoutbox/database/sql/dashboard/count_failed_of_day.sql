-- The number of messages that failed within the last day and are still failed, counted up to `cap`.
SELECT count(*)
FROM (
    SELECT FROM pgoutbox.message_view AS m
    WHERE m.state = 'failed' AND m.finished_at > now() - interval '1 day'
    LIMIT %(cap)s::bigint
) AS failed
