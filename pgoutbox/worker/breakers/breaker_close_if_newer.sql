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
), alerts AS (
    SELECT
        jsonb_build_object(
            'breaker', c.key, 'event', 'closed', 'opened_at', c.opened_at, 'error', c.last_error, 'closed_at', now()
        ) AS payload,
        left(c.key, 120) AS coalesce_key,
        NULL::text AS dedupe_key
    FROM closed AS c
), announced AS MATERIALIZED (
    -- The outer join below makes PostgreSQL run this CTE, which is a SELECT.
    \ir ../../database/sql/alert/_alerted.sql
)
SELECT extract(epoch FROM now() - c.opened_at)::float8 AS open_seconds
FROM closed AS c
LEFT JOIN announced AS a ON true
