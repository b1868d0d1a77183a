"""Databases: one worker for many databases. What they cost while they are idle, and the delay of messages in one.

Others are dead or locked. The delay is measured beside that of a worker that serves only this database.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from benchmarks.cpu import cpu_seconds_of_server
from benchmarks.latency import Delays, is_armed, is_delivered, pairs
from benchmarks.options import Options
from benchmarks.processes import Child, answer_of, program_command, running, wait_until
from benchmarks.report import Result, Table, Verdict, percentile
from benchmarks.server import Server, running_server
from pgoutbox import migrate

_SPARE_CONNECTIONS = 100
_WARM_UP_MESSAGES = 20
_START_SECONDS = 120.0


def run(server: Server, options: Options) -> Result:  # noqa: ARG001 - it needs more connections than the default
    """Measure on an embedded server of its own."""
    count = options.databases
    settings = {"max_connections": str(2 * count + _SPARE_CONNECTIONS)}
    with running_server(None, settings=settings) as own, _databases(own, count) as dsns:
        idle = _measure_idle(own, dsns, options)
        busy = next(iter(dsns))
        delays = {
            "one database": _measure_delays(own, {}, dsns[busy], options),
            f"one of {count}": _measure_delays(own, dsns, dsns[busy], options),
        }
        with _dead() as dead, _locked(dsns["database_2"]):
            name = f"one of {count}, one dead and one locked"
            delays[name] = _measure_delays(own, {**dsns, "database_3": dead}, dsns[busy], options)
    return _result(count, idle, delays, options)


@contextlib.contextmanager
def _databases(server: Server, count: int) -> Iterator[Mapping[str, str]]:
    """Create the databases and yield their DSNs by name."""
    template = make_conninfo(server.dsn, dbname="database_0")
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE database_0")
        migrate.upgrade(template)
        with psycopg.connect(template, autocommit=True) as of_template:
            of_template.execute("UPDATE pgoutbox.home SET database_id = NULL")  # Its copies may send.
        names = [f"database_{number}" for number in range(1, count + 1)]
        for name in names:
            create = sql.SQL("CREATE DATABASE {} TEMPLATE database_0 STRATEGY file_copy")
            connection.execute(create.format(sql.Identifier(name)))
    yield {name: make_conninfo(server.dsn, dbname=name) for name in names}


@contextlib.contextmanager
def _worker(server: Server, dsns: Mapping[str, str], dsn: str) -> Iterator[Child]:
    """Run a worker of these databases, or if there are none, of this one."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "databases"
        path.write_text("".join(f"{name} {dsn}\n" for name, dsn in dsns.items()))
        environment = {"PGOUTBOX_DSNS": str(path)} if dsns else {}
        command = program_command("deliver", "stamp")
        with running("deliver", command, dsn=None if dsns else dsn, environment=environment) as worker:
            count = max(len(dsns) - 2, 1)
            wait_until(lambda: _worker_count(server) >= count, what="the workers to listen", seconds=_START_SECONDS)
            yield worker


def _worker_count(server: Server) -> int:
    return _ask(server, "SELECT count(DISTINCT datname) FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox %'")


def _connection_count(server: Server) -> int:
    return _ask(server, "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox %'")


def _ask(server: Server, query: str) -> int:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def _measure_idle(server: Server, dsns: Mapping[str, str], options: Options) -> tuple[float, float, float]:
    """Return the CPU of worker and server in percent of a core, and the mean number of connections."""
    seconds = options.idle_seconds
    with _worker(server, dsns, "") as worker:
        time.sleep(seconds)  # The first reports and turns of maintenance come within a minute, and are not measured.
        connections = []
        before = _cpu_seconds(worker.pid), cpu_seconds_of_server(server)
        began_at = time.monotonic()
        while time.monotonic() - began_at < seconds:
            connections.append(_connection_count(server))
            time.sleep(1.0)
        took = time.monotonic() - began_at
        after = _cpu_seconds(worker.pid), cpu_seconds_of_server(server)
    of_worker, of_server = (100 * (end - start) / took for start, end in zip(before, after, strict=True))
    return of_worker, of_server, sum(connections) / len(connections)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _measure_delays(server: Server, dsns: Mapping[str, str], busy: str, options: Options) -> Delays:
    """Return the delays of single messages in the database `busy`."""
    count = max(1, round(options.latency_rate * options.latency_seconds)) + _WARM_UP_MESSAGES
    delays = Delays()
    with _worker(server, dsns, busy) as worker, psycopg.connect(busy, autocommit=True) as connection:
        wait_until(lambda: is_armed(busy), what="the worker to wait for work", seconds=_START_SECONDS)
        arguments = ("--rate", str(options.latency_rate), "--count", str(count))
        produced = answer_of("produce", "pgoutbox", *arguments, dsn=busy)["produced"]
        wait_until(lambda: is_delivered(connection, after=0), what="the last message to be handled")
        worker.interrupt()
        assert isinstance(produced, list)
        delays.add(pairs(worker.read()["started_at"]), produced[_WARM_UP_MESSAGES:])
    return delays


@contextlib.contextmanager
def _dead() -> Iterator[str]:
    """Yield the DSN of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()[:2]
        yield f"host={host} port={port} dbname=dead user=nobody"


@contextlib.contextmanager
def _locked(dsn: str) -> Iterator[None]:
    """Lock the messages of a database, of which one is due."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT pgoutbox.enqueue('mail.activation', '{\"user_id\": 0}')")
        connection.commit()
        connection.execute("LOCK TABLE pgoutbox.message_live IN ACCESS EXCLUSIVE MODE")
        yield
        connection.rollback()


def _result(count: int, idle: tuple[float, float, float], delays: Mapping[str, Delays], options: Options) -> Result:
    result = Result(
        "databases",
        settings={"databases": count, "idle seconds": options.idle_seconds, "messages/s": options.latency_rate},
    )
    of_worker, of_server, connections = idle
    result.tables.append(
        Table(
            "idle",
            ("databases", "CPU of worker %", "CPU of server %", "connections"),
            [(count, of_worker, of_server, connections)],
        )
    )
    result.tables.append(
        Table(
            "milliseconds from COMMIT to the handler",
            ("the busy database", "messages", "p50", "p99", "max", "missing"),
            [
                (
                    name,
                    len(one.from_sending),
                    percentile(one.from_sending, 50),
                    percentile(one.from_sending, 99),
                    max(one.from_sending, default=float("nan")),
                    one.missing_count,
                )
                for name, one in delays.items()
            ],
        )
    )
    result.verdicts.append(Verdict("CPU of the worker", of_worker, 5.0, "at most", "%"))
    result.verdicts.append(Verdict("CPU of the server", of_server, 20.0, "at most", "%"))
    result.verdicts.append(Verdict("connections of an idle database", connections / count, 1.0, "at most", ""))
    return result
