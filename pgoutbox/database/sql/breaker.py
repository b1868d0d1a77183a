"""The fleet's circuit breakers of transports and destinations."""

from typing import Final, LiteralString

# If no worker has probed long after the probe was due, no message waits for the breaker any more. Such a row is stale,
# and the breaker is opened again like a new one.

# Record one failure of a destination whose breaker is closed for this worker. With `trips`, the worker's own count has
# reached the limit: the statement opens the breaker unless another session was first, and one answer has `opened`. No
# answer: the breaker is not open, or another session opened it at this moment; a second call would return it. The
# announcement is part of the statement. A worker that started after the opening does not know of it, and sends. After
# the pause, its failure counts as a failed probe. Otherwise the pause would never grow if cron starts every worker.
BREAKER_FAILED: Final[LiteralString] = """
WITH reopened AS (
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
        AND greatest(b.retry_at, b.probe_until) >= now() - make_interval(secs => %(forget_seconds)s::float8)
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
    WHERE greatest(b.retry_at, b.probe_until) < now() - make_interval(secs => %(forget_seconds)s::float8)
    RETURNING b.key, b.opened_at, b.retry_at, b.cooldown_seconds, b.last_error
), announced AS MATERIALIZED (
    SELECT pgoutbox.enqueue(
        topic => 'pgoutbox.alert',
        payload => jsonb_build_object(
            'breaker', o.key, 'event', 'opened', 'opened_at', o.opened_at, 'error', o.last_error
        ),
        queue => %(alert_queue)s::text,
        destination => %(alert_destination)s::text,
        coalesce_key => left(o.key, 128)
    ) AS id
    FROM opened AS o
    WHERE %(alert_queue)s::text IS NOT NULL
), known(retry_at, cooldown_seconds, last_error, opened) AS (
    SELECT o.retry_at, o.cooldown_seconds, o.last_error, true FROM opened AS o
    UNION ALL
    SELECT r.retry_at, r.cooldown_seconds, r.last_error, false FROM reopened AS r
    UNION ALL
    SELECT b.retry_at, b.cooldown_seconds, b.last_error, false
    FROM pgoutbox.breaker AS b
    WHERE b.key = %(key)s::text
        AND NOT EXISTS (SELECT FROM reopened)
        AND greatest(b.retry_at, b.probe_until) >= now() - make_interval(secs => %(forget_seconds)s::float8)
)
SELECT
    extract(epoch FROM k.retry_at - now())::float8 AS retry_seconds, k.cooldown_seconds, k.last_error, k.opened,
    NULL AS probe_id
FROM known AS k
LEFT JOIN announced AS a ON a.id IS NOT NULL
"""

# Ask for a probe of an open breaker after its pause: only one session gets the `probe_id`. The others get the time of
# the next try. No answer means that the breaker is closed.
BREAKER_PROBE: Final[LiteralString] = """
WITH won AS (
    UPDATE pgoutbox.breaker AS b
    SET probe_id = gen_random_uuid(),
        probe_until = now() + make_interval(secs => %(probe_seconds)s::float8),
        worker = %(worker)s::text
    WHERE b.key = %(key)s::text
        AND b.retry_at <= now()
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
"""

# The current state of breakers that are open for this worker.
BREAKERS: Final[LiteralString] = """
SELECT
    b.key,
    extract(epoch FROM b.retry_at - now())::float8 AS retry_seconds,
    b.cooldown_seconds,
    b.last_error,
    false AS opened,
    NULL AS probe_id
FROM pgoutbox.breaker AS b
WHERE b.key = ANY (%(keys)s::text[])
"""

# The probe succeeded. Its id is the fence: a probe that was given up, or whose row an operator has reset, closes no
# breaker.
BREAKER_CLOSE_IF_PROBING: Final[LiteralString] = """
WITH closed AS (
    DELETE FROM pgoutbox.breaker AS b
    WHERE b.key = %(key)s::text AND b.probe_id = %(probe_id)s::uuid
    RETURNING b.key, b.opened_at, b.last_error
), announced AS MATERIALIZED (
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
"""

# The probe failed: twice the pause, up to a limit.
BREAKER_REOPEN_IF_PROBING: Final[LiteralString] = """
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
"""

# The probe had no result: another session may probe at once.
BREAKER_RELEASE_IF_PROBING: Final[LiteralString] = """
UPDATE pgoutbox.breaker AS b
SET probe_id = NULL,
    probe_until = NULL
WHERE b.key = %(key)s::text AND b.probe_id = %(probe_id)s::uuid
RETURNING b.key
"""
