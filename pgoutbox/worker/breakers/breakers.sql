-- The current state of breakers that are open for this worker. A missing key is a closed breaker.
SELECT
    b.key,
    extract(epoch FROM b.retry_at - now())::float8 AS retry_seconds,
    b.cooldown_seconds,
    b.last_error,
    false AS opened,
    NULL AS probe_id
FROM pgoutbox.breaker AS b
WHERE b.key = ANY (%(keys)s::text[])
