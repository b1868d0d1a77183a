-- The workers that have reported within three minutes, and the last runs of `worker --once` or `--drain`, which have ended.
SELECT
    v.name,
    v.queues,
    v.topics,
    extract(epoch FROM now() - v.ended_at)::float8 AS ended_seconds_ago,
    v.run_interval_seconds
FROM pgoutbox.worker_view AS v
ORDER BY v.name
LIMIT 1000
