-- The starts and the ends of workers since a time, the newest ones.
SELECT e.name, e.event, e.at, e.version
FROM pgoutbox.worker_event_view AS e
WHERE e.at >= %(since)s::timestamptz
ORDER BY e.at DESC, e.name
LIMIT 200
