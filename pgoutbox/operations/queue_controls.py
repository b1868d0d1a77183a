"""Pauses and limits of queues: functions on a connection made by `operator_connection.connect`.

Each call is a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, LiteralString, NamedTuple

import psycopg
from psycopg.rows import TupleRow
from pydantic import JsonValue

from pgoutbox.database import sql
from pgoutbox.database.operator_connection import fetch, transact
from pgoutbox.operations.audit import OperatorAction

_USUAL_BURST: Final = 5


class QueueControls(NamedTuple):
    """A queue that is paused or has limits, in the order of LIST_QUEUES.

    Up to `rate_count` attempts may begin in `rate_seconds`, up to `burst` at once, and `tokens` now.
    """

    queue: str
    paused_at: datetime | None
    resume_at: datetime | None
    rate_count: int | None
    rate_seconds: float | None
    burst: int | None
    tokens: float | None
    max_in_flight: int | None
    in_flight: int


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of attempts in a period."""

    count: int
    seconds: float


def list_queues(connection: psycopg.Connection[TupleRow]) -> list[QueueControls]:
    """Return the queues that are paused or have limits, by name."""
    return [QueueControls._make(row) for row in fetch(connection, sql.LIST_QUEUES, {})]


def known_queues(connection: psycopg.Connection[TupleRow]) -> list[str]:
    """Return all queues that have messages, a pause or limits. Reads all messages."""
    return [row[0] for row in fetch(connection, sql.KNOWN_QUEUES, {})]


def unknown_queues(connection: psycopg.Connection[TupleRow], queues: Sequence[str]) -> list[str]:
    """Return the names in `queues` that have neither messages nor a pause or limits: probably misspelt, or new."""
    return [row[0] for row in fetch(connection, sql.UNKNOWN_QUEUES, {"queues": list(queues)})]


def pause_queue(
    connection: psycopg.Connection[TupleRow], queue: str, *, duration: timedelta | None = None
) -> tuple[datetime, datetime | None]:
    """Stop all claims of a queue, for some time or until `resume_queue`. Return the start and the end of the pause.

    Messages in flight continue, and enqueue is not affected.
    """
    seconds = None if duration is None else duration.total_seconds()
    act = OperatorAction(seconds=seconds)
    ((paused_at, resume_at, _),) = _control(connection, act, sql.PAUSE_QUEUE, {"queue": queue, "seconds": seconds})
    return paused_at, resume_at


def resume_queue(connection: psycopg.Connection[TupleRow], queue: str) -> bool:
    """Allow claims again and wake a worker. Return False if the queue was not paused."""
    return bool(_control(connection, OperatorAction(), sql.RESUME_QUEUE, {"queue": queue}))


def limit_rate(
    connection: psycopg.Connection[TupleRow], queue: str, rate: Rate | None, *, burst: int | None = None
) -> None:
    """Limit the number of attempts of a queue that begin in a period, in all workers together; None removes the limit.

    Up to `burst` of them begin at once after an idle time (default: 5, or the rate's count if that is smaller). The
    limit applies from the next claim of each worker.
    """
    asked: dict[str, JsonValue] = {"count": None, "seconds": None, "burst": None}
    if rate is not None:
        usual = min(rate.count, _USUAL_BURST)
        asked = {"count": rate.count, "seconds": rate.seconds, "burst": usual if burst is None else burst}
    act = OperatorAction(rate="none" if rate is None else f"{rate.count}/{rate.seconds:g}s", burst=asked["burst"])
    _control(connection, act, sql.LIMIT_RATE, {"queue": queue, **asked})


def limit_in_flight(connection: psycopg.Connection[TupleRow], queue: str, max_in_flight: int | None) -> None:
    """Limit the number of attempts of a queue in flight, in all workers together; None removes the limit."""
    act = OperatorAction(max_in_flight="none" if max_in_flight is None else max_in_flight)
    _control(connection, act, sql.LIMIT_IN_FLIGHT, {"queue": queue, "max_in_flight": max_in_flight})


def _control(
    connection: psycopg.Connection[TupleRow],
    act: OperatorAction,
    statement: LiteralString,
    parameters: dict[str, object],
) -> list[TupleRow]:
    def controlled() -> list[TupleRow]:
        act.announce(connection)
        return connection.execute(statement, parameters).fetchall()

    return transact(connection, controlled)
