-- Give back a probe without a result: another session may probe at once. The fence is the probe's id.
UPDATE pgoutbox.breaker AS b
SET probe_id = NULL,
    probe_until = NULL
WHERE b.key = %(key)s::text AND b.probe_id = %(probe_id)s::uuid
RETURNING b.key
