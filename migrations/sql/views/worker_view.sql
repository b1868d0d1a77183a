-- The limit is three reports: a worker that misses one, for example because of a short outage, still counts.
CREATE VIEW pgoutbox.worker_view AS
SELECT w.name, w.queues, w.topics, w.started_at, w.seen_at
FROM pgoutbox.worker AS w
WHERE w.seen_at > now() - interval '3 minutes';

COMMENT ON VIEW pgoutbox.worker_view IS
    'The workers that have reported within three minutes, with their queues and topics. Runs with --once or --drain '
    'do not report.';
