-- The numbers of pending messages that are due, that are due later, and that have been tried, among `cap` of them in no
-- order.
SELECT
    count(*) FILTER (WHERE pending.available_at <= now()),
    count(*) FILTER (WHERE pending.available_at > now()),
    count(*) FILTER (WHERE pending.attempt_count > 0)
FROM (
    SELECT m.available_at, m.attempt_count FROM pgoutbox.message_view AS m WHERE m.state = 'pending' LIMIT %(cap)s::bigint
) AS pending
