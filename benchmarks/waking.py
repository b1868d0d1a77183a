"""Waking: the cost of idle workers for producers and server while single messages arrive.

For each rate and number of workers it shows the share of business transactions that notified, the workers' transactions
for each message, and the time from a commit to its handler's start. A worker's transactions are its statements in the
server's log. The column of all transactions is from the statistics, which also count an empty transaction of every
listening session for each notification.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import psycopg
from psycopg.rows import TupleRow

from benchmarks.idle import STATEMENTS, count_statements, logging_statements
from benchmarks.latency import Delays, are_asleep, is_armed, is_delivered, pairs
from benchmarks.options import Options
from benchmarks.processes import answer_of, child, wait_until
from benchmarks.report import Result, Table, Verdict, percentile
from benchmarks.server import Server, settle

_RATES_AND_WORKERS = ((8.0, 1), (8.0, 8), (100.0, 1), (100.0, 2), (350.0, 4))
_NOT_FOR_MESSAGES = ("BEGIN", "COMMIT", "LISTENER_HEARTBEAT", "BEGIN_MAINTENANCE_IF_DUE")
_COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
_STATISTICS_SECONDS = 11.0  # An idle session writes its statistics within ten seconds.
_WORKER_PIDS = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox %'"


@dataclass(slots=True)
class _Measured:
    notified_share: float
    transactions_per_message: float
    all_per_message: float
    delays: Delays


def run(server: Server, options: Options) -> Result:
    """Measure each rate with its number of workers in turn."""
    result = Result("waking", settings={"seconds": options.waking_seconds})
    rows: list[tuple[str | float, ...]] = []
    for rate, worker_count in _RATES_AND_WORKERS:
        measured = _measure(server, rate, worker_count, options.waking_seconds)
        name = f"{rate:g} messages/s, {worker_count} worker{'s' if worker_count > 1 else ''}"
        values = measured.delays.from_answer
        p50, p99 = percentile(values, 50), percentile(values, 99)
        share = 100 * measured.notified_share
        costs = (measured.transactions_per_message, measured.all_per_message)
        rows.append((name, share, *costs, p50, p99, measured.delays.missing_count))
        match rate, worker_count:
            case (8.0, _):
                limit = 5.0 if worker_count == 1 else 8.0
                what = f"worker transactions for each message, {name}"
                result.verdicts.append(Verdict(what, measured.transactions_per_message, limit, "at most", ""))
            case (100.0, 2):
                result.verdicts.append(
                    Verdict(f"business transactions that notify, {name}", share, 20.0, "at most", "%")
                )
                result.verdicts.append(Verdict(f"commit to handler, p99, {name}", p99, 25.0, "at most", "ms"))
    columns = ("rate, workers", "% that notify", "of workers", "all transactions", "p50 ms", "p99 ms", "missing")
    result.tables.append(Table("single messages with idle workers", columns, rows))
    return result


def _measure(server: Server, rate: float, worker_count: int, seconds: float) -> _Measured:
    count = round(rate * seconds)
    with contextlib.ExitStack() as stack:
        dsn = stack.enter_context(server.database())
        connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        settle(connection, "pgoutbox.message_live")
        workers = [stack.enter_context(child("deliver", "stamp", dsn=dsn)) for _ in range(worker_count)]
        wait_until(lambda: is_armed(dsn), what="a worker to arm its bell")
        wait_until(lambda: _is_quiet(connection, worker_count), what="the workers to fall asleep")
        senders: list[int] = []
        connection.add_notify_handler(lambda notify: senders.append(notify.pid))
        connection.execute("LISTEN pgoutbox")
        time.sleep(_STATISTICS_SECONDS)
        commits = _commits(connection)
        with logging_statements(server):
            mark = server.log.stat().st_size if server.log is not None else 0
            produced = answer_of("produce", "pgoutbox", "--rate", str(rate), "--count", str(count), dsn=dsn)["produced"]
            wait_until(lambda: _is_quiet(connection, worker_count), what="the workers to fall asleep again")
            statements = _worker_statements(server, mark, connection.info.dbname)
        time.sleep(_STATISTICS_SECONDS)
        commits = _commits(connection) - commits
        own = {pid for (pid,) in connection.execute(_WORKER_PIDS).fetchall()}
        delays = Delays()
        started: list[tuple[int, float]] = []
        for worker in workers:
            worker.interrupt()
            started += pairs(worker.read()["started_at"])
        assert isinstance(produced, list)
        delays.add(started, ((int(number), float(sent), float(answered)) for number, sent, answered in produced))
    notified = sum(pid not in own for pid in senders) / count
    return _Measured(notified, statements / count, commits / count, delays)


def _commits(connection: psycopg.Connection[TupleRow]) -> int:
    row = connection.execute(_COMMITS).fetchone()
    assert row is not None
    return int(row[0])


def _is_quiet(connection: psycopg.Connection[TupleRow], worker_count: int) -> bool:
    return is_delivered(connection, after=0) and are_asleep(connection, worker_count)


def _worker_statements(server: Server, mark: int, database: str) -> float:
    if server.log is None:
        return float("nan")
    counts = count_statements(server.log, mark, database)
    return sum(number for name, number in counts.items() if name in STATEMENTS and name not in _NOT_FOR_MESSAGES)
