-- Record one failure of a destination whose breaker is closed for this worker, and open the breaker if `trips`: the
-- worker's own count has reached the limit. The worker runs it.
-- One row: the breaker as it is. `opened` is true in one answer only. No row: the breaker is not open, or another
-- session opened it at this moment; a second call would return it.
-- With an `alert_queue`, the same statement enqueues the alert, so that no opening is without one.
WITH reopened AS (
    -- A worker that started after the opening does not know of it, and sends. After the pause, its failure counts as a
    -- failed probe. Otherwise the pause would never grow if cron starts every worker.
    UPDATE pgoutbox.breaker AS b
    SET retry_at = now() + make_interval(secs => least(b.cooldown_seconds * 2, %(max_cooldown_seconds)s::float8)),
        cooldown_seconds = least(b.cooldown_seconds * 2, %(max_cooldown_seconds)s::float8),
        probe_id = NULL,
        probe_until = NULL,
        worker = %(worker)s::text,
        last_error = %(error)s::text
    WHERE %(trips)s::boolean
        AND b.key = %(key)s::text
        AND b.retry_at <= now()
        AND (b.probe_until IS NULL OR b.probe_until <= now())
        -- If no worker has probed for two days after the probe was due, no message waits for the breaker. The row is
        -- stale, and the next CTE opens the breaker like a new one. Runs from cron may be a day apart.
        AND greatest(b.retry_at, b.probe_until) >= now() - interval '2 days'
    RETURNING b.retry_at, b.cooldown_seconds, b.last_error
), opened AS (
    INSERT INTO pgoutbox.breaker AS b (key, opened_at, retry_at, cooldown_seconds, worker, last_error)
    SELECT %(key)s::text, now(), now() + make_interval(secs => %(cooldown_seconds)s::float8),
        %(cooldown_seconds)s::float8, %(worker)s::text, %(error)s::text
    WHERE %(trips)s::boolean AND NOT EXISTS (SELECT FROM reopened)
    ON CONFLICT ON CONSTRAINT breaker_pkey DO UPDATE
    SET opened_at = EXCLUDED.opened_at,
        retry_at = EXCLUDED.retry_at,
        cooldown_seconds = EXCLUDED.cooldown_seconds,
        probe_id = NULL,
        probe_until = NULL,
        worker = EXCLUDED.worker,
        last_error = EXCLUDED.last_error
    WHERE greatest(b.retry_at, b.probe_until) < now() - interval '2 days'
    RETURNING b.key, b.opened_at, b.retry_at, b.cooldown_seconds, b.last_error
), alerts AS (
    SELECT
        jsonb_build_object(
            'breaker', o.key, 'event', 'opened', 'opened_at', o.opened_at, 'error', o.last_error
        ) AS payload,
        left(o.key, 120) AS coalesce_key,
        NULL::text AS dedupe_key
    FROM opened AS o
), announced AS MATERIALIZED (
    -- The outer join below makes PostgreSQL run this CTE, which is a SELECT.
    \ir ../../database/sql/alert/_alerted.sql
), known(retry_at, cooldown_seconds, last_error, opened) AS (
    SELECT o.retry_at, o.cooldown_seconds, o.last_error, true FROM opened AS o
    UNION ALL
    SELECT r.retry_at, r.cooldown_seconds, r.last_error, false FROM reopened AS r
    UNION ALL
    SELECT b.retry_at, b.cooldown_seconds, b.last_error, false
    FROM pgoutbox.breaker AS b
    WHERE b.key = %(key)s::text
        AND NOT EXISTS (SELECT FROM reopened)
        AND greatest(b.retry_at, b.probe_until) >= now() - interval '2 days'
)
SELECT
    extract(epoch FROM k.retry_at - now())::float8 AS retry_seconds, k.cooldown_seconds, k.last_error, k.opened,
    NULL AS probe_id
FROM known AS k
LEFT JOIN announced AS a ON true
