-- Ask for a probe of an open breaker, after its pause or `is_early`, when only one recipient may be at fault. Only one
-- session gets the `probe_id`; the others get the time of the next try. No row: the breaker is closed. The worker runs it.
WITH won AS (
    UPDATE pgoutbox.breaker AS b
    SET probe_id = gen_random_uuid(),
        probe_until = now() + make_interval(secs => %(probe_timeout_seconds)s::float8),
        worker = %(worker)s::text
    WHERE b.key = %(key)s::text
        AND (b.retry_at <= now() OR %(is_early)s::boolean)
        AND (b.probe_until IS NULL OR b.probe_until <= now())
    RETURNING b.probe_id, b.retry_at, b.cooldown_seconds, b.last_error
)
SELECT
    extract(epoch FROM w.retry_at - now())::float8 AS retry_seconds,
    w.cooldown_seconds,
    w.last_error,
    false AS opened,
    w.probe_id::text AS probe_id
FROM won AS w
UNION ALL
SELECT
    extract(epoch FROM b.retry_at - now())::float8,
    b.cooldown_seconds,
    b.last_error,
    false,
    NULL
FROM pgoutbox.breaker AS b
WHERE b.key = %(key)s::text AND NOT EXISTS (SELECT FROM won)
