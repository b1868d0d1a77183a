-- Up to `queues` queues of which a fair key, or all, have a limit in flight.
SELECT DISTINCT s.queue
FROM pgoutbox.fair_share_view AS s
WHERE s.max_in_flight IS NOT NULL
ORDER BY s.queue
LIMIT %(queues)s::bigint
