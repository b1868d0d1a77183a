"""Two sessions in an order that the test decides, without a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

R = TypeVar("R")

if TYPE_CHECKING:
    from concurrent.futures import Future

    import psycopg


def until_blocked(observer: psycopg.Connection, waiting: psycopg.Connection, future: Future[R]) -> None:
    """Return when `waiting`, whose statement the future runs, waits for another session's lock.

    Fails at once if the statement ends without having waited; the tests' lock_timeout ends every wait.
    """
    while not future.done():
        row = observer.execute("SELECT cardinality(pg_blocking_pids(%s))", (waiting.info.backend_pid,)).fetchone()
        if row is not None and row[0]:
            return
    raise AssertionError(f"the statement did not wait: {future.exception() or future.result()}")
