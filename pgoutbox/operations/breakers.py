"""Circuit breakers: list the open ones, and close one by hand.

Each function takes a connection made by `operator_connection.connect`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import psycopg
from psycopg.rows import TupleRow

from pgoutbox.database import sql
from pgoutbox.database.operator_connection import fetch, transact
from pgoutbox.operations.audit import OperatorAction
from pgoutbox.redaction import redact_text


class OpenBreaker(NamedTuple):
    """An open circuit breaker, in the order of OPEN_BREAKERS."""

    key: str
    open_seconds: float
    last_error: str


class ClosedBreaker(NamedTuple):
    """The result of a close: whether the breaker was open, and how many postponed messages are due now."""

    was_open: bool
    message_count: int


def list_open_breakers(connection: psycopg.Connection[TupleRow], *, names: Collection[str]) -> list[OpenBreaker]:
    """Return the open circuit breakers, at most the oldest 20. Values with one of `names` are redacted in errors."""
    found = [OpenBreaker._make(row) for row in fetch(connection, sql.OPEN_BREAKERS, {})]
    return [breaker._replace(last_error=redact_text(breaker.last_error, names)) for breaker in found]


def close_breaker(connection: psycopg.Connection[TupleRow], key: str) -> ClosedBreaker:
    """Close a circuit breaker for all workers, and make the messages that it postponed due.

    Workers send them after a second. Each batch of messages has its own transaction. Idempotent.
    """
    action = OperatorAction(key=key)

    def close() -> ClosedBreaker:
        action.announce(connection)
        ((was_open, message_count),) = connection.execute(sql.CLOSE_BREAKER, {"key": key}).fetchall()
        return ClosedBreaker(was_open, message_count)

    closed = transact(connection, close)
    was_open, message_count = closed
    while closed.message_count:
        closed = transact(connection, close)
        message_count += closed.message_count
    return ClosedBreaker(was_open, message_count)
