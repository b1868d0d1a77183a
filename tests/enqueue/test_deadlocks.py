"""Tests which transactions wait for each other's keys, and that one order of the keys prevents deadlocks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Outbox
from tests.support import races

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Connect


def enqueue_coalesced(connection: psycopg.Connection, key: str) -> None:
    Outbox().enqueue(connection, "greet", None, coalesce_key=key)


def enqueue_deduped(connection: psycopg.Connection, key: str) -> None:
    Outbox().enqueue(connection, "greet", None, dedupe_key=key)


def in_different_order(connect: Connect, enqueue: Callable[[psycopg.Connection, str], None]) -> None:
    """Enqueue for two keys in two transactions, each in its own order, and raise the error that ends one of them."""
    first, second, observer = connect(), connect(), connect(autocommit=True)
    for connection in (first, second):
        connection.execute("SET LOCAL lock_timeout = 0; SET LOCAL deadlock_timeout = '10ms'")
    enqueue(first, "a")
    enqueue(second, "b")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(enqueue, first, "b")
        races.until_blocked(observer, first, waiting)
        try:
            enqueue(second, "a")
            waiting.result()
        finally:
            second.rollback()


@pytest.mark.parametrize("enqueue", [enqueue_coalesced, enqueue_deduped])
def test_separate_calls_for_two_keys_in_different_order_deadlock(
    connect: Connect, enqueue: Callable[[psycopg.Connection, str], None]
) -> None:
    with pytest.raises(psycopg.errors.DeadlockDetected):
        in_different_order(connect, enqueue)


def test_separate_calls_in_one_order_wait_and_do_not_deadlock(connect: Connect) -> None:
    first, second, observer = connect(), connect(), connect(autocommit=True)
    enqueue_coalesced(first, "a")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(enqueue_coalesced, second, "a")
        races.until_blocked(observer, second, waiting)
        enqueue_coalesced(first, "b")
        first.commit()
        waiting.result()
    enqueue_coalesced(second, "b")
    second.commit()
