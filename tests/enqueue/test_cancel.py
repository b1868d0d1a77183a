"""Tests cancel in the caller's transaction: its answer in every state, and that it never waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus

from pgoutbox import ArgumentError, CancelResult, Outbox, Topic
from pgoutbox.message import State
from tests.support import races
from tests.support.held import delivered_once
from tests.support.messages import put
from tests.support.outbox_actions import state_of

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import AsyncConnect, Connect


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.mark.parametrize(
    ("state", "answer", "after"),
    [
        (State.PENDING, CancelResult.CANCELLED, State.CANCELLED),
        (State.SENDING, CancelResult.REQUESTED, State.SENDING),
        (State.SENT, CancelResult.SENT, State.SENT),
        (State.FAILED, CancelResult.FAILED, State.FAILED),
        (State.SKIPPED, CancelResult.SKIPPED, State.SKIPPED),
        (State.CANCELLED, CancelResult.ALREADY_CANCELLED, State.CANCELLED),
    ],
)
@pytest.mark.parametrize("way", ["id", "coalesce_key", "dedupe_key"])
def test_the_answer_gives_the_state_of_the_message(
    outbox: Outbox, rolled_back: psycopg.Connection, state: State, answer: CancelResult, after: State, way: str
) -> None:
    message_id = put(rolled_back, state, topic="mail", coalesce_key="c", dedupe_key="d")
    put(rolled_back, topic="other", coalesce_key="c", dedupe_key="d")
    if way == "id":
        assert outbox.on(rolled_back).cancel(message_id) is answer
    elif way == "coalesce_key":
        assert outbox.on(rolled_back).cancel(topic="mail", coalesce_key="c") is answer
    else:
        assert outbox.on(rolled_back).cancel(topic=Topic("mail"), dedupe_key="d") is answer
    assert state_of(rolled_back, message_id) == after


@pytest.mark.parametrize(
    ("state", "first", "second"),
    [
        (State.PENDING, CancelResult.CANCELLED, CancelResult.ALREADY_CANCELLED),
        (State.SENDING, CancelResult.REQUESTED, CancelResult.REQUESTED),
    ],
)
def test_a_second_cancel_changes_nothing(
    outbox: Outbox, rolled_back: psycopg.Connection, state: State, first: CancelResult, second: CancelResult
) -> None:
    message_id = put(rolled_back, state)
    assert outbox.on(rolled_back).cancel(message_id) is first
    assert outbox.on(rolled_back).cancel(message_id) is second


def test_a_message_that_does_not_exist_is_missing(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    assert outbox.on(rolled_back).cancel(2**63 - 1) is CancelResult.MISSING
    assert outbox.on(rolled_back).cancel(topic="mail", coalesce_key="none") is CancelResult.MISSING
    assert outbox.on(rolled_back).cancel(topic="mail", dedupe_key="none") is CancelResult.MISSING


async def test_a_coalesce_key_cancels_the_newest_message_and_delivers_no_older_one(
    outbox: Outbox, dsn: str, connect: Connect
) -> None:
    caller = connect()
    older = put(caller, coalesce_key="k")
    newest = put(caller, coalesce_key="k")
    assert outbox.on(caller).cancel(topic="mail", coalesce_key="k") is CancelResult.CANCELLED
    caller.commit()
    assert await delivered_once(dsn, "mail") == []
    assert state_of(caller, older) == State.SKIPPED
    assert state_of(caller, newest) == State.CANCELLED


async def test_a_cancelled_message_is_not_delivered_after_the_commit(
    outbox: Outbox, dsn: str, connect: Connect
) -> None:
    caller = connect()
    message_id = put(caller)
    caller.commit()
    assert outbox.on(caller).cancel(message_id) is CancelResult.CANCELLED
    assert await delivered_once(dsn, "mail") == []
    caller.rollback()
    assert await delivered_once(dsn, "mail") == [message_id]


async def test_the_cancel_of_a_locked_row_is_requested_without_waiting(
    outbox: Outbox, dsn: str, connect: Connect
) -> None:
    holder, caller = connect(), connect()
    message_id = put(caller)
    caller.commit()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", (message_id,))
    caller.execute("SET LOCAL lock_timeout = '1ms'")
    assert outbox.on(caller).cancel(message_id) is CancelResult.REQUESTED
    caller.commit()
    holder.rollback()
    assert await delivered_once(dsn, "mail") == []
    assert state_of(caller, message_id) == "cancelled"


def test_two_crosswise_cancels_do_not_deadlock(outbox: Outbox, connect: Connect) -> None:
    first, second = connect(), connect()
    one, other = put(first), put(first)
    first.commit()
    assert outbox.on(first).cancel(one) is CancelResult.CANCELLED
    assert outbox.on(second).cancel(other) is CancelResult.CANCELLED
    assert outbox.on(first).cancel(other) is CancelResult.REQUESTED
    assert outbox.on(second).cancel(one) is CancelResult.REQUESTED
    first.commit()
    second.commit()
    assert [state_of(first, message_id) for message_id in (one, other)] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_cancel_works_under_stricter_isolation(outbox: Outbox, connection: psycopg.Connection, isolation: str) -> None:
    message_id = put(connection)
    connection.commit()
    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
    assert outbox.on(connection).cancel(message_id) is CancelResult.CANCELLED


async def test_acancel_has_the_same_contract(outbox: Outbox, aconnect: AsyncConnect) -> None:
    connection = await aconnect()
    message_id = (await outbox.on(connection).enqueue("mail", 1, coalesce_key="k")).id
    assert await outbox.on(connection).cancel(topic="mail", coalesce_key="k") is CancelResult.CANCELLED
    assert await outbox.on(connection).cancel(message_id) is CancelResult.ALREADY_CANCELLED
    assert await outbox.on(connection).cancel(message_id + 1) is CancelResult.MISSING


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "message_id"),
        ({"message_id": 1, "topic": "mail"}, "message_id"),
        ({"message_id": 1, "topic": "mail", "dedupe_key": "d"}, "message_id"),
        ({"topic": "mail"}, "message_id"),
        ({"coalesce_key": "c"}, "message_id"),
        ({"topic": "mail", "coalesce_key": "c", "dedupe_key": "d"}, "message_id"),
        ({"message_id": 0}, "message_id"),
        ({"message_id": -1}, "message_id"),
        ({"message_id": 2**63}, "message_id"),
        ({"message_id": True}, "message_id"),
        ({"message_id": "1"}, "message_id"),
        ({"topic": "Mail", "coalesce_key": "c"}, "topic"),
        ({"topic": "mail", "coalesce_key": "\0"}, "coalesce_key"),
        ({"topic": "mail", "dedupe_key": 7}, "dedupe_key"),
        ({"topic": "mail", "coalesce_key": ""}, "coalesce_key"),
        ({"topic": "mail", "dedupe_key": ""}, "dedupe_key"),
    ],
)
def test_a_message_must_be_named_in_exactly_one_way(
    outbox: Outbox, rolled_back: psycopg.Connection, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        outbox.on(rolled_back).cancel(**arguments)
    assert caught.value.field == field
    assert rolled_back.info.transaction_status is TransactionStatus.IDLE


@pytest.mark.parametrize("level", [IsolationLevel.READ_UNCOMMITTED, IsolationLevel.READ_COMMITTED])
def test_a_cancel_whose_message_ends_meanwhile_does_not_abort_the_transaction(
    db: psycopg.Connection, connect: Connect, level: IsolationLevel
) -> None:
    """PostgreSQL treats READ UNCOMMITTED like READ COMMITTED: the cancel looks again at a row that has moved."""
    gate, business = connect(), connect()
    business.isolation_level = level
    message_id = put(db)
    races.prepare_slow_lock(db, gate)
    with ThreadPoolExecutor(1) as thread:
        locking = thread.submit(races.lock_slowly, business, message_id)
        races.until_blocked(db, business, locking)
        db.execute("UPDATE pgoutbox.message SET state = 'cancelled', finished_at = now() WHERE id = %s", [message_id])
        gate.rollback()
        assert locking.result() == []
    assert business.info.transaction_status is TransactionStatus.INTRANS
