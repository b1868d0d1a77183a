-- Double the pause of the breaker, up to a limit, after a failed probe. An early probe does not extend it. The fence is
-- the probe's id.
UPDATE pgoutbox.breaker AS b
SET retry_at = CASE
        WHEN b.retry_at > now() THEN b.retry_at
        ELSE now() + make_interval(secs => least(b.cooldown_seconds * 2, %(max_cooldown_seconds)s::float8))
    END,
    cooldown_seconds = CASE
        WHEN b.retry_at > now() THEN b.cooldown_seconds
        ELSE least(b.cooldown_seconds * 2, %(max_cooldown_seconds)s::float8)
    END,
    probe_id = NULL,
    probe_until = NULL,
    last_error = %(error)s::text
WHERE b.key = %(key)s::text AND b.probe_id = %(probe_id)s::uuid
RETURNING
    extract(epoch FROM b.retry_at - now())::float8 AS retry_seconds,
    b.cooldown_seconds,
    b.last_error,
    false AS opened,
    NULL AS probe_id
