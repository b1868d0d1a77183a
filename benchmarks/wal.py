"""WAL: bytes of write-ahead log for each message, by payload size, and where they go.

One session enqueues, claims and finishes, so that only these statements write. Full page images are off on the embedded
server, because their cost depends on the checkpoint interval, not on the messages.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import steps
from benchmarks.options import TOPIC, Options
from benchmarks.report import Result, Table, Verdict
from benchmarks.server import Server, empty_outbox, pgbench_program, settle
from pgoutbox.database import sql
from pgoutbox.database.worker_connection import session_parameters
from pgoutbox.outbox import Outbox
from pgoutbox.settings import load_settings
from pgoutbox.topics import NewMessage

_Connection = psycopg.Connection[tuple[Any, ...]]
_Batch = list[tuple[Any, ...]]
_Enqueue = Callable[[_Connection, int, int], None]
_AIMS: Mapping[int, float] = {200: 1200.0, 4000: 6000.0}
_SIZES = (200, 1000, 4000)
_PER_TRANSACTION = 1000
_PHASES = ("enqueue", "claim", "finish")
_SETTINGS = ("full_page_writes", "autovacuum")
# The form of a record in the output of pg_waldump. The first block has the relation; a commit record has none.
_RECORD = re.compile(
    r"^rmgr: (\S+) +len \(rec/tot\): +\d+/ *(\d+), .*?desc: (\S+)(?:.*?blkref #0: rel \d+/(\d+)/(\d+))?"
)


def run(server: Server, options: Options) -> Result:
    """Measure each payload size, enqueued one by one and in bulk."""
    count = options.wal_messages
    result = Result("wal", settings={"messages": count, "messages of one claim and finish": load_settings().batch_size})
    rows: list[tuple[str | float, ...]] = []
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection, _quiet(server, connection):
        connection.execute(sql.PREPARE_SESSION, session_parameters(load_settings()), prepare=False)
        for size in _SIZES:
            for how, enqueue in _ENQUEUES.items():
                written, parts = _measure(server, connection, enqueue, count, size)
                total = sum(written[phase] for phase in _PHASES)
                name = f"{size:,} bytes, {how}"
                rows.append((name, *written.values(), total))
                if size in _AIMS:
                    result.verdicts.append(Verdict(f"WAL, {name}", total, _AIMS[size], "at most", "bytes"))
                if parts is not None and how == _BULK:
                    result.tables.append(_table_of_parts(size, parts, count))
    columns = ("payload", *(f"{phase}" for phase in (*_PHASES, "VACUUM")), "sum without VACUUM")
    result.tables.insert(0, Table("bytes of WAL for each message", columns, rows))
    if server.postmaster is None:
        result.notes.append("with full page images: the settings of this server are not ours to change")
    return result


def _one_by_one(connection: _Connection, count: int, size: int) -> None:
    outbox = Outbox(load_settings())
    for _ in range(count):
        with connection.transaction():
            outbox.on(connection).enqueue(TOPIC, _payload(size))


def _in_bulk(connection: _Connection, count: int, size: int) -> None:
    outbox = Outbox(load_settings())
    for start in range(0, count, _PER_TRANSACTION):
        with connection.transaction():
            outbox.on(connection).enqueue_many(
                [NewMessage(TOPIC, _payload(size)) for _ in range(min(_PER_TRANSACTION, count - start))]
            )


_BULK = f"{_PER_TRANSACTION:,} a transaction"
_ENQUEUES: Mapping[str, _Enqueue] = {"one a transaction": _one_by_one, _BULK: _in_bulk}


def _payload(size: int) -> dict[str, str]:
    """Return an incompressible object of this number of bytes as JSON."""
    return {"text": secrets.token_urlsafe(size)[: size - 12]}


def _measure(
    server: Server, connection: _Connection, enqueue: _Enqueue, count: int, size: int
) -> tuple[dict[str, float], dict[str, Counter[str]] | None]:
    """Return the bytes for each message of each phase; if the WAL is readable, also by record and relation."""
    empty_outbox(connection)
    settle(connection, "pgoutbox.message_live")
    batches: list[_Batch] = []
    steps: dict[str, Callable[[], None]] = {
        "enqueue": lambda: enqueue(connection, count, size),
        "claim": lambda: claim(connection, batches),
        "finish": lambda: finish(connection, batches),
        "VACUUM": lambda: settle(connection, "pgoutbox.message_live"),
    }
    written: dict[str, float] = {}
    parts: dict[str, Counter[str]] = {}
    for phase, step in steps.items():
        first = _position(connection)
        step()
        last = _position(connection)
        row = connection.execute("SELECT %s::pg_lsn - %s::pg_lsn", [last, first]).fetchone()
        assert row is not None
        written[phase] = float(row[0]) / count
        if server.postmaster is not None:
            parts[phase] = _parts(connection, first, last)
    claimed_count = sum(map(len, batches))
    if claimed_count != count:
        raise RuntimeError(f"{claimed_count} of {count} messages were claimed")
    return written, parts or None


def claim(connection: _Connection, batches: list[_Batch]) -> None:
    """Claim all due messages, and add each batch."""
    cursor = connection.cursor(binary=True)
    statement, parameters = steps.claim(load_settings().batch_size)
    while rows := cursor.execute(statement, parameters, prepare=True).fetchall():
        batches.append(rows)


def finish(connection: _Connection, batches: list[_Batch]) -> None:
    """Finish these messages, whose first attempt was successful, and delete their claims."""
    for batch in batches:
        with connection.transaction():
            for statement, parameters in steps.finish(batch):
                connection.execute(statement, parameters, prepare=True)


def _position(connection: _Connection) -> str:
    row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    assert row is not None
    return str(row[0])


def _parts(connection: _Connection, first: str, last: str) -> Counter[str]:
    """Return bytes by record and relation between two positions, from `pg_waldump`."""
    row = connection.execute("SELECT current_setting('data_directory'), pg_switch_wal()").fetchone()
    assert row is not None
    answer = subprocess.run(
        [
            str(Path(pgbench_program()).with_name("pg_waldump")),
            "--start",
            first,
            "--end",
            last,
            f"--path={row[0]}/pg_wal",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    names = {
        str(node): str(name)
        for node, name in connection.execute(
            "SELECT pg_relation_filenode(c.oid), CASE WHEN t.oid IS NULL THEN c.relname ELSE t.relname || ', TOAST' END"
            " || CASE WHEN c.relname LIKE 'pg_toast%_index' THEN ' index' ELSE '' END"
            " FROM pg_class AS c LEFT JOIN pg_index AS i ON i.indexrelid = c.oid"
            " LEFT JOIN pg_class AS t ON t.reltoastrelid IN (c.oid, i.indrelid)"
        ).fetchall()
    }
    parts: Counter[str] = Counter()
    for line in answer.stdout.splitlines():
        if match := _RECORD.match(line):
            manager, size, record, _, node = match.groups()
            parts[f"{manager} {record} {names.get(node, '')}".strip()] += int(size)
    return parts


def _table_of_parts(size: int, parts: Mapping[str, Counter[str]], count: int) -> Table:
    rows = [
        (phase, part, written / count)
        for phase, counter in parts.items()
        for part, written in counter.most_common()
        if written / count >= 1
    ]
    return Table(f"where they go: {size:,} bytes, {_BULK}", ("phase", "record", "bytes"), rows)


@contextlib.contextmanager
def _quiet(server: Server, connection: _Connection) -> Iterator[None]:
    """Switch full page images and autovacuum off on the embedded server, for the measured statements."""
    if server.postmaster is None:
        yield
        return
    for name in _SETTINGS:
        connection.execute(f"ALTER SYSTEM SET {name} = off".encode())
    connection.execute("SELECT pg_reload_conf()")
    try:
        yield
    finally:
        for name in _SETTINGS:
            connection.execute(f"ALTER SYSTEM RESET {name}".encode())
        connection.execute("SELECT pg_reload_conf()")
