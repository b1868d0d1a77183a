"""Two sessions in an order that the test decides, without a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, LiteralString, TypeVar

R = TypeVar("R")

ADVISORY_LOCKS: Final[LiteralString] = (
    "(SELECT l.* FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
    " WHERE d.datname = current_database() AND l.locktype = 'advisory') AS l"
)
"""Only sessions of this database: tests of other databases may use the same server."""

if TYPE_CHECKING:
    from concurrent.futures import Future

    import psycopg


def until_blocked(observer: psycopg.Connection, waiting: psycopg.Connection, future: Future[R]) -> None:
    """Wait until `waiting`, whose statement the future runs, waits for another session's lock.

    Fail at once if the statement ends without having waited. The tests' lock_timeout ends every wait.
    """
    while not future.done():
        row = observer.execute("SELECT cardinality(pg_blocking_pids(%s))", (waiting.info.backend_pid,)).fetchone()
        if row is not None and row[0]:
            return
    raise AssertionError(f"the statement did not wait: {future.exception() or future.result()}")
