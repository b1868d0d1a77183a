"""The dashboard over a million messages in mixed states: the time of each page, and the plans of its statements."""

from __future__ import annotations

import psycopg


# States are spread over the ids as a life leaves them: what is old is finished, mostly; what failed stands among it.
_FILL = """
INSERT INTO pgoutbox.message (
    id, topic, queue, destination, payload, headers, state, coalesce_key, dedupe_key, attempt_count, created_at,
    available_at, claimed_at, worker, lease_expires_at, finished_at, skip_reason, superseded_by, last_error
)
SELECT
    n,
    (ARRAY['mail.welcome', 'mail.receipt', 'mail.newsletter', 'webhook.order', 'sms.code', 'event.audit'])[1 + n %% 6],
    (ARRAY['default', 'mail', 'bulk', 'webhooks'])[1 + n %% 4],
    'mailto:user' || n %% 50000 || '@example.org',
    jsonb_build_object('user_id', n, 'text', repeat('x', 120)),
    CASE WHEN n %% 3 = 0 THEN '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'::jsonb END,
    s.state,
    CASE WHEN n %% 5 = 0 THEN 'user-' || n END,
    CASE WHEN n %% 7 = 0 THEN 'once-' || n END,
    CASE s.state WHEN 'pending' THEN n %% 2 WHEN 'failed' THEN 11 ELSE 1 + (n %% 20 = 0)::int END,
    s.at,
    CASE WHEN s.state = 'pending' AND n %% 9 = 0 THEN now() + n * interval '1 s' ELSE s.at END,
    s.at,
    'worker-' || n %% 8,
    CASE WHEN s.state = 'sending' THEN now() + (n %% 60 - 5) * interval '1 s' END,
    CASE WHEN s.state NOT IN ('pending', 'sending') THEN s.at + (n %% 1000) * interval '2 ms' END,
    CASE WHEN s.state = 'skipped' THEN 'superseded' END,
    CASE WHEN s.state = 'skipped' THEN n + 5 END,
    CASE
        WHEN s.state = 'failed' THEN (
            ARRAY[
                '550 5.1.1 user' || n || ' unknown', 'HTTP 503 from receiver ' || n %% 40,
                'timed out after ' || n %% 60 || ' s', 'KeyError: ''user_' || n || ''''
            ]
        )[1 + n %% 4]
    END
FROM (
    SELECT
        i AS n,
        now() - (%(count)s - i) * %(hours)s / %(count)s::float8 * interval '1 hour' AS at,
        CASE
            WHEN i > %(count)s - %(sending)s THEN 'sending'
            WHEN i > %(count)s * 0.8 THEN 'pending'
            WHEN i %% 10 = 0 THEN 'failed'
            WHEN i %% 11 = 0 THEN 'skipped'
            WHEN i %% 97 = 0 THEN 'cancelled'
            ELSE 'sent'
        END AS state
    FROM generate_series(1, %(count)s::bigint) AS i
) AS s
"""


def fill(connection: psycopg.Connection[tuple[object, ...]], count: int, *, hours: float = 3.0) -> None:
    """Put so many messages in mixed states into the table, enqueued one after the other in these hours."""
    connection.execute(_FILL, {"count": count, "hours": hours, "sending": min(500, count // 100)})
    connection.execute("SELECT setval('pgoutbox.message_id_seq', %s)", [count])
    connection.execute("VACUUM (ANALYZE) pgoutbox.message")
