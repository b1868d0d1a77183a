-- Close the breaker after a success, and enqueue the alert in the same statement. The worker runs it.
-- The fence of a probe is its id: a probe that was given up, or whose row an operator has reset, closes no breaker.
-- Another send closes the breaker if it began after the last failure (`send_seconds` ago; null for a probe). The pause
-- begins with each failure.
WITH closed AS (
    DELETE FROM pgoutbox.breaker AS b
    WHERE b.key = %(key)s::text
        AND (
            b.probe_id = %(probe_id)s::uuid
            OR b.retry_at - make_interval(secs => b.cooldown_seconds) < now() - make_interval(secs => %(send_seconds)s::float8)
        )
    RETURNING b.key, b.opened_at, b.last_error
), announced AS MATERIALIZED (
    -- The outer join below makes PostgreSQL run this CTE, which is a SELECT.
    SELECT pgoutbox.enqueue(
        topic => 'pgoutbox.alert',
        payload => jsonb_build_object(
            'breaker', c.key, 'event', 'closed', 'opened_at', c.opened_at, 'error', c.last_error, 'closed_at', now()
        ),
        queue => %(alert_queue)s::text,
        destination => %(alert_destination)s::text,
        coalesce_key => left(c.key, 128)
    ) AS id
    FROM closed AS c
    WHERE %(alert_queue)s::text IS NOT NULL
)
SELECT extract(epoch FROM now() - c.opened_at)::float8 AS open_seconds
FROM closed AS c
LEFT JOIN announced AS a ON a.id IS NOT NULL
