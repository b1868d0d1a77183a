-- The last run of `worker --once` or `--drain`, if there was one.
SELECT
    r.worker,
    r.ended_at,
    extract(epoch FROM now() - r.ended_at)::float8 AS ended_seconds_ago,
    r.interval_seconds
FROM pgoutbox.worker_run AS r
