-- The time since the last successful turn of maintenance. No row before the first turn of any worker.
SELECT extract(epoch FROM now() - p.maintained_at)::float8
FROM pgoutbox.pulse_view AS p
WHERE p.maintained_at IS NOT NULL
