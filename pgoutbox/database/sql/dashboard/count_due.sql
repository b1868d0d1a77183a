-- The numbers of pending messages that are due, and that are due later, among `cap` of them in no order.
SELECT count(*) FILTER (WHERE pending.available_at <= now()), count(*) FILTER (WHERE pending.available_at > now())
FROM (SELECT m.available_at FROM pgoutbox.message_view AS m WHERE m.state = 'pending' LIMIT %(cap)s::bigint) AS pending
