"""A bad night: eight faults at once in a large backlog, for the tests of what people see and do.

`mail` waits behind an open breaker, `reports` is paused, nobody serves `newsletter`, nobody handles `push.notify`, one
failed booking halts its key, and `sms` has used up its rate limit. 500 messages have failed, for three reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import psycopg

SERVED: Final = ["default", "mail", "reports", "bookings", "sms"]
HANDLED: Final = ["mail.digest", "report.daily", "booking.confirm", "sms.code", "order.paid"]
BREAKER: Final = "smtp:mx.example.org:25"

_WORKER: Final = """
INSERT INTO pgoutbox.worker (name, queues, topics, version, slots) VALUES ('worker-1', %s, %s, '0.1', 50)
"""
_BREAKER: Final = """
INSERT INTO pgoutbox.breaker (key, holds, opened_at, retry_at, cooldown_seconds, worker, last_error)
VALUES (
    %s, ARRAY[pgoutbox._hold_of('mail', 'mail.digest', 1::smallint, 'mailto:x')], now() - interval '50 min',
    now() + interval '10 min', 600, 'worker-1', 'ConnectionRefusedError: port 25 refuses connections'
)
"""
_DONE: Final = """
INSERT INTO pgoutbox.message (
    topic, payload, state, attempt_count, worker, claimed_at, created_at, available_at, finished_at
)
SELECT 'order.paid', '{}', 'sent', 1, 'worker-1', at, at - interval '1 s', at - interval '1 s', at + interval '20 ms'
FROM generate_series(1, %s::integer) AS n, LATERAL (SELECT now() - n * interval '1 s') AS t(at)
"""
_FAILED: Final = """
INSERT INTO pgoutbox.message (topic, payload, state, attempt_count, worker, claimed_at, finished_at, last_error)
SELECT
    'order.paid', '{}', 'failed', 11, 'worker-1', now() - interval '1 h', now() - n * interval '10 s',
    (ARRAY['KeyError: ''vat_id''', '550 5.1.1 user' || n || ' unknown', 'HTTP 410 from shop.example.org: gone'])[
        1 + n % 3
    ]
FROM generate_series(1, 500) AS n
"""
_HALTING: Final = """
INSERT INTO pgoutbox.message (
    topic, queue, payload, state, ordering_key, halts_key, attempt_count, worker, claimed_at, finished_at, last_error
)
VALUES (
    'booking.confirm', 'bookings', '{}', 'failed', 'room-7', true, 11, 'worker-1', now() - interval '2 h',
    now() - interval '2 h', 'ValueError: the room is double-booked'
)
RETURNING id
"""
_WAITING: Final = """
INSERT INTO pgoutbox.message (topic, queue, destination, ordering_key, payload, created_at, available_at)
SELECT topic, queue, destination, ordering_key, '{}', at, at
FROM (
    VALUES
        ('mail.digest', 'mail', 'mailto:reader@example.org', NULL, %(mail)s::integer),
        ('report.daily', 'reports', NULL, NULL, %(reports)s),
        ('newsletter.issue', 'newsletter', NULL, NULL, %(newsletter)s),
        ('push.notify', 'default', NULL, NULL, %(push)s),
        ('booking.confirm', 'bookings', NULL, 'room-7', 56),
        ('sms.code', 'sms', NULL, NULL, %(sms)s)
    ) AS kind(topic, queue, destination, ordering_key, count)
CROSS JOIN LATERAL generate_series(1, kind.count) AS n
CROSS JOIN LATERAL (SELECT now() - interval '1 h' + n * interval '1 ms') AS t(at)
"""


def fill(connection: psycopg.Connection, backlog: int) -> int:
    """Store the night with about so many e-mails, in proportion to them the others. Return the failed booking."""
    connection.execute(_WORKER, [SERVED, HANDLED])
    connection.execute(_DONE, [backlog // 25])
    connection.execute(_FAILED)
    ((halting,),) = connection.execute(_HALTING).fetchall()
    counts = {"mail": 1, "reports": 36, "newsletter": 6, "push": 600, "sms": 120}
    connection.execute(_WAITING, {name: max(10, backlog // share) for name, share in counts.items()})
    connection.execute(_BREAKER, [BREAKER])
    connection.execute(
        "INSERT INTO pgoutbox.queue (name, rate_count, rate_seconds, burst, tokens, tokens_at)"
        " VALUES ('sms', 60, 3600, 60, 0, now())"
    )
    connection.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('reports', now() - interval '2 h')")
    connection.execute("ANALYZE pgoutbox.message")
    return int(halting)
