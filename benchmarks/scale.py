"""Scale: what one server carries, by payload size and kind of key.

One producer enqueues in transactions of 1,000 messages, then one worker process delivers them, with a handler that does
nothing. For each message: the CPU time of the server, the WAL, and what the sent message takes on the disk.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psycopg

from benchmarks.cpu import cpu_seconds_of_server
from benchmarks.options import TOPIC, Options, rotated
from benchmarks.processes import answer_of
from benchmarks.report import Cell, Result, Table, median
from benchmarks.server import Server, empty_outbox, settle
from pgoutbox.outbox import Outbox
from pgoutbox.settings import load_settings
from pgoutbox.topics import NewMessage

_PER_TRANSACTION = 1_000
_ORDERING_KEYS = 100
_LARGE_BYTES = 20_000
_LARGE_SHARE = 10  # So many times fewer large messages.
_TABLES = ("pgoutbox.message_live", "pgoutbox.message", "pgoutbox.key_head", "pgoutbox.dedupe")
_DISK = """
SELECT sum(pg_total_relation_size(c.oid))
FROM pg_class AS c
WHERE c.relnamespace = 'pgoutbox'::regnamespace AND c.relkind = 'r'
"""


@dataclass(frozen=True, slots=True)
class _Variant:
    size: int
    key: str | None = None

    @property
    def name(self) -> str:
        size = f"{self.size:,} bytes"
        return size if self.key is None else f"{size}, {self.key.replace('_', ' ')}"

    def message(self, number: int) -> NewMessage:
        keys: Mapping[str, Mapping[str, str]] = {
            "coalesce_key": {"coalesce_key": f"c{number}"},
            "dedupe_key": {"dedupe_key": f"d{number}"},
            "ordering_key": {"ordering_key": f"o{number % _ORDERING_KEYS}"},
        }
        # It cannot be compressed.
        payload = {"user_id": number, "text": secrets.token_urlsafe(self.size)[: self.size - 30]}
        return NewMessage(TOPIC, payload, **(keys[self.key] if self.key is not None else {}))  # type: ignore[arg-type]


_VARIANTS: Sequence[_Variant] = (
    _Variant(200),
    _Variant(4_000),
    _Variant(64_000),
    _Variant(200, "coalesce_key"),
    _Variant(200, "dedupe_key"),
    _Variant(200, "ordering_key"),
)


def run(server: Server, options: Options) -> Result:
    """Measure each variant in a database of its own, and take the medians of the rounds."""
    found: dict[str, list[tuple[float, ...]]] = {variant.name: [] for variant in _VARIANTS}
    for turn in range(options.peer_rounds):
        for variant in rotated(_VARIANTS, turn):
            found[variant.name].append(_measure(server, variant, options.scale_messages))
    rows: list[tuple[Cell, ...]] = [
        (name, *(median(values) for values in zip(*measured, strict=True))) for name, measured in found.items()
    ]
    result = Result("scale", settings={"messages": options.scale_messages, "ordering keys": _ORDERING_KEYS})
    columns = ("payload and key", "enqueued/s", "delivered/s", "server us", "WAL bytes", "disk bytes")
    result.tables.append(Table("by payload and key", columns, rows))
    return result


def _measure(server: Server, variant: _Variant, count: int) -> tuple[float, ...]:
    if variant.size >= _LARGE_BYTES:
        count //= _LARGE_SHARE
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        empty_outbox(connection)
        settle(connection, *_TABLES)
        disk, wal, cpu = _disk_bytes(connection), _wal_bytes(connection), cpu_seconds_of_server(server)
        began_at = time.monotonic()
        _enqueue(connection, variant, count)
        enqueue_seconds = time.monotonic() - began_at
        wal_of_enqueue, cpu_of_enqueue = _wal_bytes(connection) - wal, cpu_seconds_of_server(server) - cpu
        settle(connection, *_TABLES)
        wal, cpu = _wal_bytes(connection), cpu_seconds_of_server(server)
        answer = answer_of("deliver", "drain", dsn=dsn)
        seconds = answer["seconds"]
        assert isinstance(seconds, float)
        wal_bytes = wal_of_enqueue + _wal_bytes(connection) - wal
        cpu_seconds = cpu_of_enqueue + cpu_seconds_of_server(server) - cpu
        settle(connection, *_TABLES)
        disk_bytes = _disk_bytes(connection) - disk
    rates = count / enqueue_seconds, count / seconds
    return (*rates, 1e6 * cpu_seconds / count, wal_bytes / count, disk_bytes / count)


def _enqueue(connection: psycopg.Connection[tuple[object, ...]], variant: _Variant, count: int) -> None:
    outbox = Outbox(load_settings())
    for start in range(0, count, _PER_TRANSACTION):
        numbers = range(start, min(count, start + _PER_TRANSACTION))
        with connection.transaction():
            outbox.on(connection).enqueue_many([variant.message(number) for number in numbers])


def _wal_bytes(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    return _number(connection, "SELECT pg_current_wal_lsn() - '0/0'")


def _disk_bytes(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    return _number(connection, _DISK)


def _number(connection: psycopg.Connection[tuple[object, ...]], query: str) -> int:
    ((value,),) = connection.execute(query.encode()).fetchall()
    return int(str(value))
