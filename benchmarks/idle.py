"""Idle: the cost of an idle worker. Statements by kind, CPU and memory, compared with an idle PgQueuer.

The embedded server logs every statement. On another server only the transactions of the database are counted, with
pg_stat_database.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString

import psycopg

from benchmarks.drain import PGQUEUER_BATCH_SIZE, PGQUEUER_DRIVER
from benchmarks.options import Options
from benchmarks.processes import Child, answer_of, child
from benchmarks.report import Cell, Result, Table, Verdict
from benchmarks.server import Server
from pgoutbox.database import sql
from pgoutbox.kernel import statements

STATEMENTS: Mapping[str, LiteralString] = {
    **{name: getattr(sql, name) for name in dir(sql)},
    **{name: text for name, text in vars(statements).items() if name.isupper()},
}
"""The statements of the package by their names."""
_SETTLING_SECONDS = 5.0
# The listener's heartbeat and the report of a worker do not belong to a queue. Neither does maintenance: one worker
# runs it every five minutes on its own connection.
_APART = {
    "HEARTBEAT": "heartbeat",
    "REPORT_WORKER": "report",
    "BEGIN_MAINTENANCE_IF_DUE": "maintenance",
    "MAINTENANCE_SUCCEEDED": "maintenance",
}
_MAINTENANCE_APPLICATION = "pgoutbox maintenance"
_MAINTENANCE = "maintenance, "
_LINE = re.compile(r"([^|]*)\|([^|]*)\|LOG:  (?:execute [^:]*|statement): (.*)")


@dataclass(frozen=True, slots=True)
class _Sample:
    cpu_seconds: float
    resident_mib: float


def run(server: Server, options: Options) -> Result:
    """Leave both workers idle for a while, in separate databases."""
    seconds = options.idle_seconds
    with server.database() as ours, server.database(migrated=False) as theirs:
        answer_of("peer", "install", dsn=theirs)
        names = {"pgoutbox": _name_of(ours), "pgqueuer": _name_of(theirs)}
        arguments = ("--batch-size", str(PGQUEUER_BATCH_SIZE), "--driver", PGQUEUER_DRIVER)
        with (
            child("deliver", "run", dsn=ours) as worker,
            child("peer", "run", *arguments, dsn=theirs) as peer,
            logging_statements(server),
        ):
            time.sleep(_SETTLING_SECONDS)
            workers = {"pgoutbox": worker, "pgqueuer": peer}
            mark = server.log.stat().st_size if server.log is not None else 0
            transactions = {system: _transaction_count(server, name) for system, name in names.items()}
            before = {system: _sample(w) for system, w in workers.items()}
            time.sleep(seconds)
            after = {system: _sample(w) for system, w in workers.items()}
            if server.log is not None:
                counts = {system: count_statements(server.log, mark, name) for system, name in names.items()}
            else:
                counts = {
                    system: Counter({"transactions": _transaction_count(server, name) - transactions[system]})
                    for system, name in names.items()
                }
    return _result(counts, before, after, seconds)


def _name_of(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        return connection.info.dbname


@contextlib.contextmanager
def logging_statements(server: Server) -> Iterator[None]:
    """Let the embedded server log every statement, for the length of the `with` block."""
    if server.log is None:
        yield
        return
    # The sessions are open already, so only a setting of the whole server affects them.
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET log_statement = 'all'")
        connection.execute("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            connection.execute("ALTER SYSTEM RESET log_statement")
            connection.execute("SELECT pg_reload_conf()")


def _transaction_count(server: Server, database: str) -> int:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s", (database,)
        ).fetchone()
    assert row is not None
    return int(row[0])


def count_statements(log: Path, mark: int, database: str) -> Counter[str]:
    """Count the statements of one database, by their names in `STATEMENTS` if they are known there."""
    known = {_normalised(text): name for name, text in STATEMENTS.items()}
    found: Counter[str] = Counter()
    current: list[str] | None = None
    with log.open(encoding="utf-8", errors="replace") as lines:
        lines.seek(mark)
        prefix = ""
        for line in [*lines, "end"]:
            if line.startswith("\t") and current is not None:
                current.append(line)
                continue
            if current is not None:
                text = _normalised(" ".join(current))
                found[prefix + known.get(text, text[:60])] += 1
                current = None
            match = _LINE.match(line)
            if match is not None and match[2] == database:
                current = [match[3]]
                prefix = _MAINTENANCE if match[1] == _MAINTENANCE_APPLICATION else ""
    return found


def _normalised(statement: str) -> str:
    return " ".join(re.sub(r"%\(\w+\)s|\$\d+", "?", statement).replace("%%", "%").split())


def _sample(worker: Child) -> _Sample | None:
    """Return CPU time and resident memory from /proc, or None without /proc."""
    try:
        stat = Path(f"/proc/{worker.pid}/stat").read_text()
        status = Path(f"/proc/{worker.pid}/status").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    resident = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    assert resident is not None
    return _Sample(ticks / os.sysconf("SC_CLK_TCK"), int(resident[1]) / 1024)


def _result(
    counts: dict[str, Counter[str]],
    before: dict[str, _Sample | None],
    after: dict[str, _Sample | None],
    seconds: float,
) -> Result:
    result = Result("idle", settings={"seconds": seconds, "queues": 1})
    rows: list[tuple[Cell, ...]] = []
    for system, found in counts.items():
        for name, count in found.most_common():
            kind = _kind_of(name) if system == "pgoutbox" else "-"
            rows.append((f"{system}: {name}", kind, count, 60 * count / seconds))
    result.tables.append(Table("statements", ("statement", "kind", "count", "per minute"), rows))
    processes: list[tuple[Cell, ...]] = []
    for system, start in before.items():
        end = after[system]
        if start is None or end is None:
            continue
        percent = 100 * (end.cpu_seconds - start.cpu_seconds) / seconds
        processes.append((system, percent, end.resident_mib))
        if system == "pgoutbox":
            result.verdicts.append(Verdict("CPU of the worker", percent, 0.5, "at most", "%"))
            result.verdicts.append(Verdict("memory of the worker", end.resident_mib, 80, "at most", "MiB"))
    result.tables.append(Table("processes", ("worker", "CPU %", "resident MiB"), processes))
    of_queue = sum(count for name, count in counts["pgoutbox"].items() if _kind_of(name) == "queue")
    what = "statements per minute and queue, heartbeats apart"
    result.verdicts.append(Verdict(what, 60 * of_queue / seconds, 2.0, "at most", "/min"))
    return result


def _kind_of(name: str) -> str:
    return "maintenance" if name.startswith(_MAINTENANCE) else _APART.get(name, "queue")
