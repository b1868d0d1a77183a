"""The input of the checks: settings, the application's outbox if known, and a database connection."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, LiteralString, NamedTuple, TypeVar, cast

import psycopg
from psycopg.rows import DictRow, dict_row

from pgoutbox.database import connections, sql
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings

T = TypeVar("T")

STATEMENT_SECONDS: Final = 10
MOST_QUEUES: Final = 20_000
ANSWER_SECONDS = 5.0  # How long a server may take to report its statement timeout.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The thresholds above which a check reports a finding. Durations are in seconds."""

    transaction_seconds: float = 300.0
    transactions: int = 1_000_000
    retained_bytes: int = 1 << 30
    notify_warning: float = 0.1
    notify_problem: float = 0.5
    dead_rows: int = 20_000
    round_trip_seconds: float = 5.0
    clock_seconds: float = 5.0
    partition_seconds: float = 86_400.0
    overdue_seconds: float = 86_400.0
    done_without_rules: int = 5_000_000
    run_seconds: float = 90_000.0
    late_seconds: float = 60.0
    undelivered_seconds: float = 86_400.0
    in_flight_seconds: float = 900.0
    attempts: int = 20
    failed_seconds: float = 90_000.0
    failures_read: int = 10_000


class RankedQueue(NamedTuple):
    """A queue with the due time of its oldest due message; columns in the order of RANK_QUEUES."""

    queue: str
    oldest_due_at: datetime | None
    oldest_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorContext:
    """The database connection, the settings and the thresholds of the database checks.

    `ranked` are the queues with live messages or controls, once a check has asked for them.
    """

    settings: Settings
    outbox: Outbox | None
    connection: psycopg.Connection[Any]
    limits: Limits = field(default_factory=Limits)
    statement_seconds: float = STATEMENT_SECONDS
    clock: Callable[[], float] = time.time
    ranked: list[RankedQueue] = field(default_factory=list)

    def ranked_queues(self) -> list[RankedQueue]:
        """Return the queues with live messages or controls, late ones first. The checks share one read of them."""
        if not self.ranked:
            self.ranked.extend(
                RankedQueue(**row) for row in self.ask(sql.RANK_QUEUES, {"prefix": "", "queues": MOST_QUEUES})
            )
        return self.ranked

    def ask(self, statement: LiteralString, parameters: Mapping[str, object] | None = None) -> list[DictRow]:
        """Run one statement in its own read-only transaction, and return its rows."""

        def fetch(connection: psycopg.Connection[Any]) -> list[DictRow]:
            with connection.cursor(row_factory=dict_row) as cursor:
                return cursor.execute(statement, parameters).fetchall()

        return self.read(fetch)

    def read(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Run `work` in a read-only transaction."""
        with self.connection.transaction():
            self.connection.execute(sql.PREPARE_OPERATION, {"statement_timeout": f"{self.statement_seconds}s"})
            return work(self.connection)

    def ask_one(self, statement: LiteralString, parameters: Mapping[str, object] | None = None) -> DictRow:
        """Run a statement like `ask`, and return its only row."""
        (row,) = self.ask(statement, parameters)
        return row


def run(
    connection: psycopg.Connection[DictRow], statement: LiteralString, parameters: Mapping[str, object] | None = None
) -> list[DictRow]:
    """Run one statement outside an explicit transaction, and return its rows."""
    cursor = connection.execute(statement, parameters)
    return cursor.fetchall() if cursor.description is not None else []


@contextlib.contextmanager
def connected(dsn: str, settings: Settings) -> Iterator[psycopg.Connection[DictRow]]:
    """Open a connection with read-only transactions. Works through a transaction pooler and on a standby."""
    opened = connections.connect(
        dsn,
        purpose="doctor",
        connect_timeout_seconds=settings.connect_timeout_seconds,
        answer_seconds=STATEMENT_SECONDS + ANSWER_SECONDS,
    )
    connection = cast("psycopg.Connection[DictRow]", opened)
    with contextlib.closing(connection):
        connection.row_factory = dict_row
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        connection.read_only = True
        yield connection
