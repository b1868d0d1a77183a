-- A run of `worker --once` or `--drain` ends. Its row replaces the row of the last run. `failures` has the failures in a
-- row of each breaker that this run has used; those of others stay. Overlapping runs may lose a failure, and then the
-- breaker opens a run later.
WITH own AS (
    DELETE FROM pgoutbox.worker AS w
    WHERE w.name = %(worker)s::text
    RETURNING w.name, w.queues, w.topics, w.redirect_to, w.version, w.slots, w.started_at
)
INSERT INTO pgoutbox.worker AS last (
    name, queues, topics, redirect_to, version, slots, started_at, ended_at, failures
)
SELECT
    o.name, o.queues, o.topics, o.redirect_to, o.version, o.slots, o.started_at, now(),
    jsonb_strip_nulls(%(failures)s::jsonb)
FROM own AS o
ON CONFLICT ((true)) WHERE ended_at IS NOT NULL DO UPDATE
SET name = excluded.name,
    queues = excluded.queues,
    topics = excluded.topics,
    redirect_to = excluded.redirect_to,
    version = excluded.version,
    slots = excluded.slots,
    started_at = excluded.started_at,
    seen_at = excluded.seen_at,
    ended_at = excluded.ended_at,
    run_interval_seconds = greatest(extract(epoch FROM excluded.ended_at - last.ended_at)::float8, 0),
    -- A destination that is used once and never again would stay here, so their number has a limit.
    failures = CASE
        WHEN octet_length(last.failures::text) > 100000 THEN excluded.failures
        ELSE jsonb_strip_nulls(last.failures || %(failures)s::jsonb)
    END
RETURNING last.name
