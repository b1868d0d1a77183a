"""Latency: from a commit to the start of its handler in an idle worker, for pgoutbox and for PgQueuer in the same run.

Producer and worker are processes of their own that share CLOCK_MONOTONIC. The two systems take turns, so that neither
competes with the other for the cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg

from benchmarks.drain import PGQUEUER_BATCH_SIZE, PGQUEUER_DRIVER
from benchmarks.options import Options
from benchmarks.processes import Child, answer_of, child, wait_until
from benchmarks.report import Result, Table, Verdict, median, percentile
from benchmarks.server import Server

_PHASES = 4
_WARM_UP_MESSAGES = 20


@dataclass(slots=True)
class _Delays:
    """Milliseconds from the COMMIT's answer, and from its sending, to the handler's start."""

    from_answer: list[float] = field(default_factory=list)
    from_sending: list[float] = field(default_factory=list)
    missing_count: int = 0


def run(server: Server, options: Options) -> Result:
    """Phases of one system and the other in turn, each with a worker that is idle between any two messages."""
    count = max(1, round(options.latency_rate * options.latency_seconds / _PHASES)) + _WARM_UP_MESSAGES
    delays = {"pgoutbox": _Delays(), "pgqueuer": _Delays()}
    with server.database() as ours, server.database(migrated=False) as theirs:
        answer_of("peer", "install", dsn=theirs)
        for _ in range(_PHASES):
            with child("deliver", "stamp", dsn=ours) as worker:
                wait_until(lambda: _is_armed(ours), what="the worker to arm its bell")
                _measure(worker, "pgoutbox", ours, options.latency_rate, count, delays["pgoutbox"])
            arguments = ("--batch-size", str(PGQUEUER_BATCH_SIZE), "--driver", PGQUEUER_DRIVER)
            with child("peer", "stamp", *arguments, dsn=theirs) as worker:
                wait_until(_listens(theirs), what="PgQueuer to listen")
                _measure(worker, "pgqueuer", theirs, options.latency_rate, count, delays["pgqueuer"])
    return _result(delays, options)


def _is_armed(dsn: str) -> bool:
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


def _listens(dsn: str) -> Callable[[], bool]:
    def ask() -> bool:
        with psycopg.connect(dsn, autocommit=True) as connection:
            # It listens within milliseconds of connecting, and its scheduler asks something every second ever after.
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


def _measure(worker: Child, system: str, dsn: str, rate: float, count: int, delays: _Delays) -> None:
    produced = answer_of("produce", system, "--rate", str(rate), "--count", str(count), dsn=dsn)["produced"]
    worker.interrupt()
    started_at = dict(_pairs(worker.read()["started_at"]))
    assert isinstance(produced, list)
    for number, sent_at, answered_at in produced[_WARM_UP_MESSAGES:]:
        if number not in started_at:
            delays.missing_count += 1
            continue
        delays.from_answer.append(1e3 * (started_at[number] - answered_at))
        delays.from_sending.append(1e3 * (started_at[number] - sent_at))


def _pairs(value: object) -> list[tuple[int, float]]:
    assert isinstance(value, list)
    return [(int(number), float(at)) for number, at in value]


def _result(delays: dict[str, _Delays], options: Options) -> Result:
    result = Result(
        "latency",
        settings={"messages/s": options.latency_rate, "seconds": options.latency_seconds, "phases": _PHASES},
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
    ours, theirs = delays["pgoutbox"].from_answer, delays["pgqueuer"].from_answer
    result.verdicts += [
        Verdict("pgoutbox p50", percentile(ours, 50), 2.0, "at most", "ms"),
        Verdict("pgoutbox p99", percentile(ours, 99), 5.0, "at most", "ms"),
        Verdict("p50, pgoutbox / pgqueuer", percentile(ours, 50) / percentile(theirs, 50), 1.0, "at most"),
        Verdict("p99, pgoutbox / pgqueuer", percentile(ours, 99) / percentile(theirs, 99), 1.0, "at most"),
    ]
    result.samples = {f"{system}, from answer, ms": d.from_answer for system, d in delays.items()}
    result.notes.append(
        "The flush of the COMMIT lies between its sending and its answer and is part of neither system; the worker "
        "may start before the producer has read the answer."
    )
    result.notes.append(f"median from sending: pgoutbox {median(delays['pgoutbox'].from_sending):.2f} ms")
    return result
