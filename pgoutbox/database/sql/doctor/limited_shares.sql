-- Up to `queues` queues of which a fair key, or all, have a limit in flight or a rate.
SELECT DISTINCT s.queue
FROM pgoutbox.fair_share_view AS s
WHERE num_nonnulls(s.max_in_flight, s.rate_count) > 0
ORDER BY s.queue
LIMIT %(queues)s::bigint
