"""Latency: from a commit to the start of its handler in an idle worker, for pgoutbox and other systems in one run.

Producer and worker are separate processes that share CLOCK_MONOTONIC. The systems take turns, so they do not compete
for the cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psycopg

from benchmarks.options import Options, rotated
from benchmarks.processes import Child, answer_of, wait_until
from benchmarks.report import Result, Table, Verdict, median, percentile
from benchmarks.server import Server
from benchmarks.systems import System, available_systems

_WARM_UP_MESSAGES = 20


@dataclass(slots=True)
class Delays:
    """Milliseconds from the COMMIT's answer, and from its sending, to the start of the handler."""

    from_answer: list[float] = field(default_factory=list)
    from_sending: list[float] = field(default_factory=list)
    missing_count: int = 0

    def add(self, started: Iterable[tuple[int, float]], produced: Iterable[tuple[int, float, float]]) -> None:
        """Add the times of a worker and of a producer, for the messages that count."""
        started_at = dict(started)
        for number, sent_at, answered_at in produced:
            if number not in started_at:
                self.missing_count += 1
                continue
            self.from_answer.append(1e3 * (started_at[number] - answered_at))
            self.from_sending.append(1e3 * (started_at[number] - sent_at))


def run(server: Server, options: Options) -> Result:
    """Run phases of one system after the other; each worker is idle between two messages."""
    systems, notes = available_systems()
    count = max(1, round(options.latency_rate * options.latency_seconds / options.latency_phases)) + _WARM_UP_MESSAGES
    delays = {system.name: Delays() for system in systems}
    with contextlib.ExitStack() as stack:
        databases = {system.name: stack.enter_context(system.database(server)) for system in systems}
        for phase in range(options.latency_phases):
            for system in rotated(systems, phase):
                dsn = databases[system.name]
                with system.running("stamp", *system.worker, dsn=dsn) as worker:
                    if system.node:
                        worker.read()  # The child is ready.
                    wait_until(_is_idle(system, dsn), what=f"{system.name} to wait for work")
                    _measure(worker, system, dsn, options.latency_rate, count, delays[system.name])
    return _result(delays, options, notes)


def _is_idle(system: System, dsn: str) -> Callable[[], bool]:
    return (lambda: is_armed(dsn)) if system.name == "pgoutbox" else _listens(dsn)


def is_armed(dsn: str) -> bool:
    """Return whether a worker of the database sleeps and holds the bell."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            """
            SELECT EXISTS (
                SELECT FROM pg_locks AS l
                WHERE l.locktype = 'advisory' AND l.classid = 1885826146 AND l.mode = 'ExclusiveLock' AND l.granted
                    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
            )
            """
        ).fetchone()
    return row is not None and bool(row[0])


def are_asleep(connection: psycopg.Connection[tuple[object, ...]], worker_count: int) -> bool:
    """Return whether this number of workers has sent no query for a second: then the watch is stable."""
    row = connection.execute(
        """
        SELECT count(*)
        FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'pgoutbox listen' AND state = 'idle'
            AND state_change < clock_timestamp() - interval '1 second'
        """
    ).fetchone()
    return row == (worker_count,)


def is_delivered(connection: psycopg.Connection[tuple[object, ...]], *, after: int) -> bool:
    """Return whether all messages with an id beyond this one are delivered."""
    row = connection.execute(
        "SELECT NOT EXISTS (SELECT FROM pgoutbox.message_live WHERE id > %s AND state IN ('pending', 'sending'))",
        [after],
    ).fetchone()
    return row is not None and bool(row[0])


def last_id(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    """Return the id of the last enqueued message, or 0."""
    ((message_id,),) = connection.execute("SELECT coalesce(max(id), 0) FROM pgoutbox.message").fetchall()
    assert isinstance(message_id, int)
    return message_id


def _listens(dsn: str) -> Callable[[], bool]:
    def ask() -> bool:
        with psycopg.connect(dsn, autocommit=True) as connection:
            # It listens within milliseconds of connecting, and its scheduler sends a query every second after that.
            row = connection.execute(
                """
                SELECT count(*)
                FROM pg_stat_activity AS a
                WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.state = 'idle'
                    AND a.backend_start < clock_timestamp() - interval '2 seconds'
                """
            ).fetchone()
        return row is not None and bool(row[0])

    return ask


def _measure(worker: Child, system: System, dsn: str, rate: float, count: int, delays: Delays) -> None:
    if system.name == "pg-boss":  # It has no SQL function and no Python client, so its own process produces.
        produced = system.answer("produce", str(rate), str(count), dsn=dsn)["produced"]
    else:
        arguments = ("--rate", str(rate), "--count", str(count))
        produced = answer_of("produce", system.name, *arguments, dsn=dsn)["produced"]
    with psycopg.connect(dsn, autocommit=True) as connection:
        wait_until(lambda: not _is_owed(connection, system), what=f"{system.name} to handle the last message")
    worker.interrupt()
    assert isinstance(produced, list)
    delays.add(pairs(worker.read()["started_at"]), produced[_WARM_UP_MESSAGES:])


def _is_owed(connection: psycopg.Connection[tuple[object, ...]], system: System) -> bool:
    row = connection.execute(system.unfinished.encode()).fetchone()
    return row is not None and bool(row[0])


def pairs(value: object) -> list[tuple[int, float]]:
    """Return the calls that a worker reports: the numbers of the messages and the start of each call."""
    assert isinstance(value, list)
    return [(int(number), float(at)) for number, at in value]


def _result(delays: dict[str, Delays], options: Options, notes: list[str]) -> Result:
    result = Result(
        "latency",
        settings={
            "messages/s": options.latency_rate,
            "seconds": options.latency_seconds,
            "phases": options.latency_phases,
        },
        notes=notes,
    )
    result.tables.append(
        Table(
            "milliseconds to the handler's start",
            ("system, from", "messages", "p50", "p90", "p99", "max", "missing"),
            [
                (
                    f"{system}, COMMIT {what}",
                    len(values),
                    percentile(values, 50),
                    percentile(values, 90),
                    percentile(values, 99),
                    max(values, default=float("nan")),
                    d.missing_count,
                )
                for system, d in delays.items()
                for what, values in (("answered", d.from_answer), ("sent", d.from_sending))
            ],
        )
    )
    ours = delays["pgoutbox"].from_answer
    result.verdicts += [
        Verdict("pgoutbox p50", percentile(ours, 50), 2.0, "at most", "ms"),
        Verdict("pgoutbox p99", percentile(ours, 99), 5.0, "at most", "ms"),
    ]
    for name in ("pgqueuer", "procrastinate", "graphile-worker"):
        if name in delays:
            theirs = delays[name].from_answer
            for percent in (50, 99):
                ratio = percentile(ours, percent) / percentile(theirs, percent)
                result.verdicts.append(Verdict(f"p{percent}, pgoutbox / {name}", ratio, 1.0, "at most"))
    result.samples = {f"{system}, from answer, ms": d.from_answer for system, d in delays.items()}
    result.notes.append(
        "The flush of the COMMIT is between its sending and its answer, and belongs to neither system. The worker may "
        "start before the producer has read the answer."
    )
    result.notes.append(f"median from sending: pgoutbox {median(delays['pgoutbox'].from_sending):.2f} ms")
    return result
