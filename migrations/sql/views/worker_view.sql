-- The workers that have reported within three minutes, with their queues and topics. A row with `ended_at` is a run of
-- pgoutbox worker --once or --drain, the last one with its queues.
--
-- The limit is three reports: a worker that misses one, for example because of a short outage, still counts.
CREATE VIEW pgoutbox.worker_view AS
SELECT
    w.name,
    w.queues,
    w.topics,
    w.redirect_to,
    w.version,
    w.slots,
    w.started_at,
    w.seen_at,
    w.ended_at,
    w.run_interval_seconds
FROM pgoutbox.worker AS w
WHERE (w.seen_at > now() - interval '3 minutes' AND w.stopped_at IS NULL) OR w.ended_at IS NOT NULL;
