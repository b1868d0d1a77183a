"""Beside: a single message while many others cannot be delivered, or while an old snapshot is open.

Each condition has its own database, and the conditions take turns. The verdicts compare the median time from a commit
to the start of the handler with that of an empty queue, also for messages with an ordering key.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import psycopg

from benchmarks.latency import Delays, are_asleep, is_armed, is_delivered, last_id, pairs
from benchmarks.options import TOPIC, Options, rotated
from benchmarks.processes import ChildError, answer_of, child, wait_until
from benchmarks.report import Result, Table, Verdict, percentile, ratio_of_rounds
from benchmarks.server import Server, load_backlog, load_pending, settle

_OTHER_TOPIC: Final = "mail.unknown"
_OTHER_QUEUE: Final = "other"
_CALM_SECONDS: Final = 20.0

_Connection = psycopg.Connection[tuple[object, ...]]
_Load = Callable[[str, _Connection, Options], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Condition:
    """The load in the table, and the queue and the ordering keys of the measured messages."""

    load: str
    queue: str = "default"
    key: str = ""
    target: float | None = None
    rate: float | None = None


_CONDITIONS: Final[Mapping[str, _Condition]] = {
    "empty queue": _Condition("nothing"),
    "empty queue, new ordering keys": _Condition("nothing", key="new-"),
    "messages of another topic": _Condition("topic", target=1.5),
    "retries of another topic": _Condition("retries", target=1.5),
    "old snapshot after deliveries": _Condition("snapshot", target=1.5),
    # At higher rates few claims search from the beginning, so the median shows nothing of a slow search.
    "empty queue, one a second": _Condition("nothing", rate=1.0),
    "old snapshot after deliveries, one a second": _Condition("snapshot", target=2.0, rate=1.0),
    "waiting ordering keys, same queue": _Condition("keys", target=2.0),
    "waiting ordering keys, another queue": _Condition("keys", queue=_OTHER_QUEUE, target=2.0),
    "waiting ordering keys, new ordering keys": _Condition("keys", key="new-", target=2.0),
}


@dataclass(slots=True)
class _Measured:
    medians: list[float]
    first_medians: list[float]
    values: list[float]
    seconds_to_arm: list[float]
    missing_count: int = 0


def run(server: Server, options: Options) -> Result:
    """Alternate the conditions; each phase begins with the start of a worker."""
    measured = {name: _Measured([], [], [], []) for name in _CONDITIONS}
    with contextlib.ExitStack() as stack:
        databases = {
            load: stack.enter_context(_loaded(server, options, load))
            for load in dict.fromkeys(condition.load for condition in _CONDITIONS.values())
        }
        for phase in range(options.beside_phases):
            for name in rotated(list(_CONDITIONS), phase):
                condition = _CONDITIONS[name]
                _measure(databases[condition.load], condition, options, measured[name])
    return _result(measured, options)


@contextlib.contextmanager
def _loaded(server: Server, options: Options, load: str) -> Iterator[str]:
    with (
        server.database() as dsn,
        psycopg.connect(dsn, autocommit=True) as connection,
        _LOADS[load](dsn, connection, options),
    ):
        yield dsn


@contextlib.contextmanager
def _nothing(dsn: str, connection: _Connection, options: Options) -> Iterator[None]:  # noqa: ARG001
    settle(connection, "pgoutbox.message_live")
    yield


@contextlib.contextmanager
def _unknown_topic(dsn: str, connection: _Connection, options: Options) -> Iterator[None]:  # noqa: ARG001
    load_backlog(connection, options.beside_messages, topic=_OTHER_TOPIC)
    settle(connection, "pgoutbox.message_live")
    yield


@contextlib.contextmanager
def _unknown_retries(dsn: str, connection: _Connection, options: Options) -> Iterator[None]:  # noqa: ARG001
    load_backlog(connection, options.beside_messages, topic=_OTHER_TOPIC)
    connection.execute("UPDATE pgoutbox.message_live SET attempt_count = 1, lane = 1")
    settle(connection, "pgoutbox.message_live")
    yield


@contextlib.contextmanager
def _old_snapshot(dsn: str, connection: _Connection, options: Options) -> Iterator[None]:
    settle(connection, "pgoutbox.message_live")
    with psycopg.connect(dsn) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT count(*) FROM pgoutbox.message")
        load_pending(connection, options.beside_deliveries, topic=TOPIC)
        answer_of("deliver", "drain", dsn=dsn)
        yield


@contextlib.contextmanager
def _waiting_keys(dsn: str, connection: _Connection, options: Options) -> Iterator[None]:  # noqa: ARG001
    """Enqueue two messages for each key: the first waits for its retry, and the second, which is due, for the first."""
    connection.execute(
        """
        INSERT INTO pgoutbox.message (topic, payload, ordering_key, attempt_count, lane, available_at)
        SELECT
            %(topic)s::text,
            jsonb_build_object('user_id', 0),
            'key-' || k,
            2 - n,
            2 - n,
            CASE n WHEN 1 THEN now() + interval '1 day' ELSE now() - interval '1 hour' END
        FROM generate_series(1, 2) AS n, generate_series(1, %(count)s::integer) AS k
        """,
        {"topic": TOPIC, "count": options.beside_keys},
    )
    settle(connection, "pgoutbox.message_live")
    yield


_LOADS: Final[Mapping[str, _Load]] = {
    "nothing": _nothing,
    "topic": _unknown_topic,
    "retries": _unknown_retries,
    "snapshot": _old_snapshot,
    "keys": _waiting_keys,
}


def _measure(dsn: str, condition: _Condition, options: Options, measured: _Measured) -> None:
    """Produce messages from the start of the worker, and again when it sleeps."""
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        child("deliver", "stamp", "default", _OTHER_QUEUE, dsn=dsn) as worker,
    ):
        wait_until(lambda: _is_started(dsn), what="a worker to connect")
        began_at = time.monotonic()
        first = _produce(dsn, condition, options, 0)
        _wait_for_calm(lambda: is_armed(dsn), "a worker to arm its bell")
        measured.seconds_to_arm.append(time.monotonic() - began_at)
        _wait_for_calm(lambda: are_asleep(connection, 1), "the worker to fall asleep")
        before = last_id(connection)
        later = _produce(dsn, condition, options, len(first))
        _wait_for_calm(lambda: is_delivered(connection, after=before), "the messages to be delivered")
        worker.interrupt()
        started = pairs(worker.read()["started_at"])
    at_first, delays = Delays(), Delays()
    at_first.add(started, first)
    delays.add(started, later)
    measured.first_medians.append(percentile(at_first.from_answer, 50))
    measured.medians.append(percentile(delays.from_answer, 50))
    measured.values += delays.from_answer
    measured.missing_count += at_first.missing_count + delays.missing_count


def _wait_for_calm(condition: Callable[[], bool], what: str) -> None:
    # A worker that never becomes idle is measured as it is, and undelivered messages count as missing.
    with contextlib.suppress(ChildError):
        wait_until(condition, what=what, seconds=_CALM_SECONDS)


def _is_started(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'pgoutbox claim %')"
        ).fetchone()
    return row is not None and bool(row[0])


def _produce(dsn: str, condition: _Condition, options: Options, first: int) -> list[tuple[int, float, float]]:
    rate = condition.rate or options.latency_rate
    count = max(1, round(options.beside_seconds * rate))
    arguments = ["--rate", str(rate), "--count", str(count), "--first", str(first)]
    arguments += ["--queue", condition.queue]
    if condition.key:
        arguments += ["--ordering-key", condition.key]
    produced = answer_of("produce", "pgoutbox", *arguments, dsn=dsn)["produced"]
    assert isinstance(produced, list)
    return [(int(number), float(sent_at), float(answered_at)) for number, sent_at, answered_at in produced]


def _result(measured: Mapping[str, _Measured], options: Options) -> Result:
    result = Result(
        "beside",
        settings={
            "messages": options.beside_messages,
            "deliveries": options.beside_deliveries,
            "ordering keys": options.beside_keys,
            "phases": options.beside_phases,
        },
        samples={f"{name}, ms": m.values for name, m in measured.items()},
    )
    rows = [
        (
            name,
            len(m.values),
            percentile(m.values, 50),
            percentile(m.values, 99),
            _ratio(measured, name, "medians"),
            percentile(m.first_medians, 50),
            _ratio(measured, name, "first_medians"),
            percentile(m.seconds_to_arm, 50),
            m.missing_count,
        )
        for name, m in measured.items()
    ]
    columns = ("beside", "messages", "p50", "p99", "/ empty", "p50 after start", "/ empty", "s to sleep", "missing")
    result.tables.append(Table("milliseconds from the commit to the handler's start", columns, rows))
    result.verdicts += [
        Verdict(f"single message with {name} / empty queue", _ratio(measured, name, "medians"), c.target, "at most")
        for name, c in _CONDITIONS.items()
        if c.target is not None
    ]
    result.notes.append("After start: the messages that are enqueued while the worker starts and looks at all lanes.")
    return result


def _ratio(measured: Mapping[str, _Measured], name: str, medians: str) -> float:
    condition = _CONDITIONS[name]
    others = {"empty queue, new ordering keys": condition.key, "empty queue, one a second": condition.rate}
    empty = next((other for other, is_meant in others.items() if is_meant), "empty queue")
    return ratio_of_rounds(getattr(measured[name], medians), getattr(measured[empty], medians))
