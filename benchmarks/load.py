"""Load: from a commit to the start of its handler while the worker is busy, at 70 % of the maximum rate.

The maximum rate is measured first, with a producer that enqueues as fast as possible while the worker runs. Producer,
worker and server share the cores. Then the producer keeps a steady rate.
"""

from __future__ import annotations

import time

import psycopg

from benchmarks.latency import Delays, is_armed, pairs
from benchmarks.options import Options
from benchmarks.processes import answer_of, child, wait_until
from benchmarks.report import Result, Table, percentile
from benchmarks.server import Server, empty_outbox, settle

_SHARE = 0.7
_MESSAGES_PER_TRANSACTION = 50
_WARM_UP_SECONDS = 1.0


def run(server: Server, options: Options) -> Result:
    """Measure the maximum rate, then the delays at 70 % of it."""
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        capacity, _ = _phase(dsn, connection, options.load_seconds, rate=None)
        rate = _SHARE * capacity
        delivered, delays = _phase(dsn, connection, options.load_seconds, rate=rate)
    values = delays.from_answer
    result = Result(
        "load",
        settings={"seconds": options.load_seconds, "messages of one transaction": _MESSAGES_PER_TRANSACTION},
        samples={"from answer, ms": values},
    )
    result.tables.append(
        Table(
            "messages per second",
            ("phase", "messages/s"),
            [("delivered with a producer that never waits", capacity), ("delivered at 70 % of it", delivered)],
        )
    )
    result.tables.append(
        Table(
            "milliseconds from the COMMIT's answer to the handler's start, at 70 %",
            ("messages", "p50", "p90", "p99", "max", "missing"),
            [
                (
                    str(len(values)),
                    percentile(values, 50),
                    percentile(values, 90),
                    percentile(values, 99),
                    max(values, default=float("nan")),
                    delays.missing_count,
                )
            ],
        )
    )
    if delivered < 0.95 * rate:
        result.notes.append("the producer did not keep its rate: the machine was busy with other work")
    return result


def _phase(
    dsn: str, connection: psycopg.Connection[tuple[object, ...]], seconds: float, *, rate: float | None
) -> tuple[float, Delays]:
    """Return the messages per second that were handled while the producer ran, and the delays."""
    empty_outbox(connection)
    settle(connection, "pgoutbox.message_live")
    arguments = ["--seconds", str(seconds), "--size", str(_MESSAGES_PER_TRANSACTION)]
    if rate is not None:
        arguments += ["--rate", str(rate)]
    with child("deliver", "stamp", dsn=dsn) as worker:
        wait_until(lambda: is_armed(dsn), what="the worker to arm its bell")
        produced = answer_of("stream", *arguments, dsn=dsn)["produced"]
        if rate is not None:
            wait_until(lambda: not _is_owed(connection), what="the worker to deliver the rest")
        worker.interrupt()
        started = pairs(worker.read()["started_at"])
    assert isinstance(produced, list)
    first_at, last_at = produced[0][1], produced[-1][2]
    in_time = sum(1 for _, at in started if at <= last_at)
    delays = Delays()
    measured = [transaction for transaction in produced if transaction[1] >= first_at + _WARM_UP_SECONDS]
    delays.add(
        started,
        ((number + offset, *times) for number, *times in measured for offset in range(_MESSAGES_PER_TRANSACTION)),
    )
    return in_time / (last_at - first_at), delays


def _is_owed(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    row = connection.execute("SELECT EXISTS (SELECT FROM pgoutbox.message_live)").fetchone()
    assert row is not None
    time.sleep(0.05)
    return bool(row[0])
