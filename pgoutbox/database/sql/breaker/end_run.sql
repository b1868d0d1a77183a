-- Record the end of a run of `worker --once` or `--drain`. `failures` has the failures in a row of each breaker that this
-- run has used; those of others stay. Overlapping runs may lose a failure, and then the breaker opens a run later.
INSERT INTO pgoutbox.worker_run AS r (worker, failures)
VALUES (%(worker)s::text, jsonb_strip_nulls(%(failures)s::jsonb))
ON CONFLICT ON CONSTRAINT worker_run_pkey DO UPDATE
SET ended_at = now(),
    interval_seconds = greatest(extract(epoch FROM now() - r.ended_at)::float8, 0),
    worker = excluded.worker,
    -- A destination that is used once and never again would stay here, so their number has a limit.
    failures = CASE
        WHEN octet_length(r.failures::text) > 100000 THEN excluded.failures
        ELSE jsonb_strip_nulls(r.failures || %(failures)s::jsonb)
    END
RETURNING r.worker
