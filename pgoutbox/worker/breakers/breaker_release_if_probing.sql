-- Give back a probe without a result: another session may probe at once. If its message was sent on another way than
-- through the breaker, its `hold` is wrong, so claims take the messages of the hold again. The fence is the probe's id.
UPDATE pgoutbox.breaker AS b
SET probe_id = NULL,
    probe_until = NULL,
    holds = array_remove(b.holds, %(hold)s::text)
WHERE b.key = %(key)s::text AND b.probe_id = %(probe_id)s::uuid
RETURNING b.key
