"""Fair shares: how long messages of small tenants wait beside one with 90 % of all messages, and the limits of keys.

The backlog is there when the worker starts. Meanwhile each message of a small tenant has a new key.
"""

from __future__ import annotations

import bisect
import contextlib
import time

import psycopg
from psycopg.types.json import Jsonb

from benchmarks.options import TOPIC, Options
from benchmarks.processes import child, wait_until
from benchmarks.report import Result, Table, Verdict, percentile
from benchmarks.server import Server, empty_outbox, settle
from pgoutbox.operations import Operator

_PROCESSES = 4
_LIMIT = 5
_SHARE = 10  # One message of so many is not of the big tenant.
_PAUSE_SECONDS = 0.1
_SAMPLE_SECONDS = 10.0
_BIG = "big"
_BACKLOG = """
SELECT count(*)
FROM pgoutbox.enqueue_many(
    (
        SELECT jsonb_agg(%(draft)s::jsonb || jsonb_build_object(
            'payload', jsonb_build_object('user_id', n),
            'fair_key', CASE
                WHEN %(keys)s::integer = 0 THEN NULL
                WHEN n %% %(share)s::integer > 0 THEN %(big)s::text
                ELSE 'key ' || n / %(share)s::integer %% (%(keys)s::integer - 1)
            END
        ))
        FROM generate_series(%(start)s::integer, %(start)s::integer + 999) AS n
    ),
    notify => false
)
"""
_MOST_AT_ONCE = """
SELECT coalesce(max(key.in_flight), 0)
FROM (
    SELECT count(*) AS in_flight
    FROM pgoutbox.message_live AS m
    WHERE m.state = 'sending'
    GROUP BY m.fair_key
) AS key
"""


def run(server: Server, options: Options) -> Result:
    """Measure without a key, with some numbers of keys, and with a limit in four processes."""
    result = Result("fair", {"messages of small tenants": f"one each {_PAUSE_SECONDS} s", "big tenant": "90 %"})
    rows = []
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        for key_count in (0, *options.fair_keys):
            rate, waits, places = _waits(dsn, connection, max(options.fair_messages, _SHARE * key_count), key_count)
            seconds = (percentile(waits, 50), percentile(waits, 99))
            rows.append((key_count, rate, len(waits), *seconds, percentile(places, 50), max(places, default=0)))
        most, samples = _most_in_flight(dsn, connection, options.fair_messages // 2, options.fair_keys[0])
    columns = ("keys", "messages/s", "small", "p50, ms", "p99, ms", "others before, p50", "max")
    result.tables.append(Table("from COMMIT to the handler", columns, rows))
    result.tables.append(
        Table(
            "in flight, limit of each key",
            ("processes", "limit", "samples", "most"),
            [(_PROCESSES, _LIMIT, samples, most)],
        )
    )
    result.verdicts.append(Verdict("most in flight of a key", most, _LIMIT, "at most", ""))
    return result


def _load(connection: psycopg.Connection[tuple[object, ...]], count: int, key_count: int) -> None:
    empty_outbox(connection)
    connection.execute("TRUNCATE pgoutbox.fair_share")
    for start in range(0, count, 1000):
        values = {"draft": Jsonb({"topic": TOPIC}), "keys": key_count, "share": _SHARE, "big": _BIG, "start": start}
        connection.execute(_BACKLOG, values)
    settle(connection, "pgoutbox.message_live")


def _waits(
    dsn: str, connection: psycopg.Connection[tuple[object, ...]], count: int, key_count: int
) -> tuple[float, list[float], list[float]]:
    """Return the rate, and of each message of a small tenant the milliseconds and the messages that began before it."""
    _load(connection, count, key_count)
    committed_at: dict[int, float] = {}
    with child("deliver", "stamp", dsn=dsn) as worker:
        wait_until(lambda: _has_begun(connection), what="the first messages to be sent")
        while _are_left(connection, count // _SHARE):
            number = count + len(committed_at)
            connection.execute(
                "SELECT pgoutbox.enqueue(%s, %s, fair_key => %s)",
                (TOPIC, Jsonb({"user_id": number}), f"small {number}" if key_count else None),
            )
            committed_at[number] = time.monotonic()
            time.sleep(_PAUSE_SECONDS)
        wait_until(lambda: not _are_left(connection, 1), what="the last message to be sent")
        worker.interrupt()
        started = worker.read()["started_at"]
    assert isinstance(started, list)
    times = sorted(at for _, at in started)
    begun_at = dict(started)
    waits = [1e3 * (begun_at[number] - at) for number, at in committed_at.items()]
    places = [
        float(bisect.bisect(times, begun_at[number]) - bisect.bisect(times, at)) for number, at in committed_at.items()
    ]
    return len(times) / (times[-1] - times[0]), waits, places


def _most_in_flight(
    dsn: str, connection: psycopg.Connection[tuple[object, ...]], count: int, key_count: int
) -> tuple[int, int]:
    """Return the most messages of a key that were in flight at once, and how often that was read."""
    _load(connection, count, key_count)
    Operator(connection).set_fair_share("default", max_in_flight=_LIMIT)
    most = samples = 0
    with contextlib.ExitStack() as stack:
        for _ in range(_PROCESSES):
            stack.enter_context(child("deliver", "wait", dsn=dsn))
        wait_until(lambda: _has_begun(connection), what="the first messages to be sent")
        until = time.monotonic() + _SAMPLE_SECONDS
        while time.monotonic() < until and _are_left(connection, 1):
            found = connection.execute(_MOST_AT_ONCE).fetchone()
            assert found is not None
            assert isinstance(found[0], int)
            most, samples = max(most, found[0]), samples + 1
    return most, samples


def _has_begun(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    return connection.execute("SELECT FROM pgoutbox.message AS m WHERE m.state <> 'pending' LIMIT 1").rowcount > 0


def _are_left(connection: psycopg.Connection[tuple[object, ...]], count: int) -> bool:
    """Whether so many messages are not sent yet."""
    return connection.execute("SELECT FROM pgoutbox.message_live LIMIT %s", (count,)).rowcount == count
