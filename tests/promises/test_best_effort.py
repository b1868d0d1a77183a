"""`best_effort=True`: a locked table costs the message after a second, and another request's key never does."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import pytest

from pgoutbox import Enqueued, Outbox, State
from tests.support.outbox_actions import until_blocked
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    import psycopg

    from tests.conftest import AsyncConnect, Connect

KEYS: Final = ("dedupe_key", "coalesce_key", "ordering_key")
# Longer than the patience with a locked table.
LONG: Final = "1.5 s"


@pytest.fixture
def second_click(db: psycopg.Connection) -> psycopg.Connection:
    db.execute("CREATE TABLE registration (number bigint)")
    return db


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def register(
    outbox: Outbox,
    connection: psycopg.Connection,
    **keys: Any,  # noqa: ANN401 - one of the keys
) -> Enqueued | None:
    """Write a registration, and its mail as best effort. The server ends a wait without an end."""
    connection.execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = '40s'")
    connection.execute("INSERT INTO registration VALUES (7)")
    return outbox.on(connection).enqueue("mail", {"number": 7}, best_effort=True, **keys)


def until_waited_long(db: psycopg.Connection, waiting: psycopg.Connection, future: Future[Enqueued | None]) -> None:
    """Wait until the session has waited for a lock for longer than a best-effort enqueue waits for a table."""

    def has_waited() -> bool:
        assert not future.done(), f"the enqueue did not wait: {future.result()}"
        statement = f"SELECT FROM pg_locks WHERE pid = %s AND waitstart < clock_timestamp() - interval '{LONG}'"
        return bool(db.execute(statement.encode(), [waiting.info.backend_pid]).fetchall())

    wait_until(has_waited, lambda: "no wait for a lock")


def mails(db: psycopg.Connection) -> list[int]:
    rows = db.execute("SELECT id FROM pgoutbox.message_view WHERE state <> 'skipped' ORDER BY id").fetchall()
    return [number for (number,) in rows]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("key", KEYS)
def test_a_second_request_has_its_mail_if_the_first_one_rolls_back(
    second_click: psycopg.Connection, connect: Connect, thread: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture,
    key: str,
) -> None:  # fmt: skip
    outbox, first, second = Outbox(), connect(), connect()
    register(outbox, first, **{key: "registration-7"})
    answer = thread.submit(register, outbox, second, **{key: "registration-7"})
    until_waited_long(second_click, second, answer)
    first.rollback()
    enqueued = answer.result()
    second.commit()
    assert enqueued is not None
    assert not enqueued.duplicate
    assert mails(second_click) == [enqueued.id]
    assert errors(caplog) == []


def test_a_second_request_gets_the_mail_of_the_first_one_if_that_commits(
    second_click: psycopg.Connection, connect: Connect, thread: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, first, second = Outbox(), connect(), connect()
    known = register(outbox, first, dedupe_key="registration-7")
    answer = thread.submit(register, outbox, second, dedupe_key="registration-7")
    until_waited_long(second_click, second, answer)
    first.commit()
    enqueued = answer.result()
    second.commit()
    assert known is not None
    assert enqueued == Enqueued(known.id, True, State.PENDING)
    assert mails(second_click) == [known.id]
    assert errors(caplog) == []


def test_a_wait_for_a_key_ends_with_the_callers_own_lock_timeout(
    second_click: psycopg.Connection, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, first, second = Outbox(), connect(), connect()
    register(outbox, first, dedupe_key="registration-7")
    second.execute("INSERT INTO registration VALUES (7); SET LOCAL lock_timeout = '1200ms'")
    assert outbox.on(second).enqueue("mail", {"number": 7}, dedupe_key="registration-7", best_effort=True) is None
    second.commit()
    assert "55P03" in errors(caplog)[0]
    assert second_click.execute("SELECT number FROM registration").fetchall() == [(7,)]


@pytest.mark.parametrize("table", ["message", "message_live", "dedupe", "key_head", "id_floor"])
def test_a_locked_table_costs_the_mail_and_not_the_registration(
    second_click: psycopg.Connection, connect: Connect, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    repair, business = connect(), connect()
    repair.execute(f"LOCK TABLE pgoutbox.{table} IN ACCESS EXCLUSIVE MODE".encode())
    assert register(Outbox(), business, dedupe_key="registration-7", ordering_key="member-7") is None
    business.commit()
    assert second_click.execute("SELECT number FROM registration").fetchall() == [(7,)]
    assert "55P03" in errors(caplog)[0]  # And not the statement_timeout of the test.


@pytest.mark.parametrize("table", ["message_failed", "message_done"])
def test_a_locked_table_of_ended_messages_costs_no_new_mail(
    second_click: psycopg.Connection, connect: Connect, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    """Its locks until the commit would also delay the drop of an old partition."""
    repair, business = connect(), connect()
    repair.execute(f"LOCK TABLE pgoutbox.{table} IN ACCESS EXCLUSIVE MODE".encode())
    enqueued = register(Outbox(), business, dedupe_key="registration-7", ordering_key="member-7")
    business.commit()
    repair.rollback()
    assert enqueued is not None
    assert mails(second_click) == [enqueued.id]
    assert errors(caplog) == []


async def test_a_cancelled_enqueue_leaves_the_transaction_to_its_caller(
    outbox: Outbox, connect: Connect, aconnect: AsyncConnect, second_click: psycopg.Connection
) -> None:
    first = connect()
    outbox.on(first).enqueue("mail", 1, coalesce_key="k")
    connection = await aconnect()
    await connection.execute("INSERT INTO registration VALUES (7)")
    lost = asyncio.ensure_future(outbox.on(connection).enqueue("mail", 1, coalesce_key="k", best_effort=True))
    await until_blocked(second_click, lost)
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    await connection.commit()
    first.rollback()
    assert second_click.execute("SELECT number FROM registration").fetchall() == [(7,)]
