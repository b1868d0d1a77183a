-- Double the pause of the breaker, up to a limit, after a failed probe. The fence is the probe's id.
UPDATE pgoutbox.breaker AS b
SET retry_at = now() + make_interval(secs => least(b.cooldown_seconds * 2, %(max_cooldown_seconds)s::float8)),
    cooldown_seconds = least(b.cooldown_seconds * 2, %(max_cooldown_seconds)s::float8),
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
