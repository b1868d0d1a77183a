"""Tests the owner of messages, and the calls that cancel everything of an owner or to a destination."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import errors
from pydantic import BaseModel

from pgoutbox import ArgumentError, Cancelled, CancelResult, NewMessage, Outbox, Topic
from tests.support.outbox_actions import enqueue, state_of
from tests.support.worker_sql import claim, finish_sent

if TYPE_CHECKING:
    from tests.conftest import AsyncConnect, Connect

ADA = "mailto:ada@example.org"
BOB = "mailto:bob@example.org"


class Account(BaseModel):
    account_id: int


def owners(connection: psycopg.Connection) -> list[str | None]:
    return [owner for (owner,) in connection.execute("SELECT owner FROM pgoutbox.message ORDER BY id").fetchall()]


def test_an_owner_is_stored_by_every_way_to_enqueue(outbox: Outbox, connection: psycopg.Connection) -> None:
    outbox.on(connection).enqueue("mail", None, owner="account-7")
    bulk: list[NewMessage[Any]] = [
        NewMessage("mail", None, owner="account-8"),
        NewMessage("mail", None, owner="account-9", coalesce_key="k"),
        NewMessage("mail", None, owner="account-10", dedupe_key="k"),
        NewMessage("mail", None, owner="account-11", ordering_key="k"),
        NewMessage("mail", "x" * 2_000, owner="account-12"),
    ]
    for item in bulk:
        outbox.on(connection).enqueue_many([item])
    assert owners(connection) == [f"account-{number}" for number in range(7, 13)]


def test_a_topic_computes_the_owner(outbox: Outbox, connection: psycopg.Connection) -> None:
    topic = Topic("mail", payload=Account, owner=lambda p: f"account-{p.account_id}")
    outbox.on(connection).enqueue(topic, Account(account_id=7))
    assert owners(connection) == ["account-7"]
    with pytest.raises(ArgumentError, match="owner: belongs to the definition of topic 'mail'"):
        outbox.on(connection).enqueue(topic, Account(account_id=7), owner="account-8")


@pytest.mark.parametrize(("owner", "problem"), [("", "must not be empty"), ("x" * 513, "has 513 bytes"), (7, "text")])
def test_an_invalid_owner_is_refused(
    outbox: Outbox, connection: psycopg.Connection, owner: object, problem: str
) -> None:
    with pytest.raises(ArgumentError, match=f"owner: .*{problem}"):
        outbox.on(connection).enqueue("mail", None, owner=owner)  # type: ignore[call-overload]


@pytest.mark.parametrize("owner", ["", "x" * 513])
def test_the_function_refuses_an_invalid_owner(rolled_back: psycopg.Connection, owner: str) -> None:
    with pytest.raises(psycopg.DataError, match=r"pgoutbox\.enqueue: owner: must not be"):
        enqueue(rolled_back, owner=owner)


def test_everything_of_an_owner_is_cancelled(outbox: Outbox, connection: psycopg.Connection) -> None:
    mine = [outbox.on(connection).enqueue(topic, None, owner="account-7").id for topic in ("mail", "sms", "mail")]
    other = outbox.on(connection).enqueue("mail", None, owner="account-8").id
    unowned = outbox.on(connection).enqueue("mail", None).id
    assert outbox.on(connection).cancel_all(owner="account-7") == [Cancelled(i, CancelResult.CANCELLED) for i in mine]
    assert [state_of(connection, i) for i in (*mine, other, unowned)] == ["cancelled"] * 3 + ["pending"] * 2
    assert outbox.on(connection).cancel_all(owner="account-7") == []


def test_everything_to_a_destination_is_cancelled(outbox: Outbox, connection: psycopg.Connection) -> None:
    (mine,) = outbox.on(connection).enqueue_fanout("mail", None, [ADA]).ids
    other = outbox.on(connection).enqueue("mail", None, destination=BOB).id
    assert outbox.on(connection).cancel_all(destination=ADA) == [Cancelled(mine, CancelResult.CANCELLED)]
    assert state_of(connection, other) == "pending"


def test_a_topic_limits_what_is_cancelled(outbox: Outbox, connection: psycopg.Connection) -> None:
    digest = outbox.on(connection).enqueue("digest", None, owner="account-7", destination=ADA).id
    notice = outbox.on(connection).enqueue("notice", None, owner="account-7", destination=ADA).id
    cancelled = [Cancelled(digest, CancelResult.CANCELLED)]
    assert outbox.on(connection).cancel_all(owner="account-7", topic="digest") == cancelled
    assert outbox.on(connection).cancel_all(destination=ADA, topic="digest") == []
    assert state_of(connection, notice) == "pending"


async def test_an_async_connection_cancels_too(outbox: Outbox, aconnect: AsyncConnect) -> None:
    connection = await aconnect()
    enqueued = await outbox.on(connection).enqueue("mail", None, owner="account-7")
    assert await outbox.on(connection).cancel_all(owner="account-7") == [Cancelled(enqueued.id, CancelResult.CANCELLED)]


def test_an_attempt_in_flight_is_asked_to_stop(outbox: Outbox, db: psycopg.Connection, connect: Connect) -> None:
    in_flight, sent, pending = (enqueue(db, owner="account-7") for _ in range(3))
    rows = {row.id: row for row in claim(db, total=2)}
    assert finish_sent(db, (sent, rows[sent].attempt_count))
    producer = connect()
    assert outbox.on(producer).cancel_all(owner="account-7") == [
        Cancelled(in_flight, CancelResult.REQUESTED),
        Cancelled(pending, CancelResult.CANCELLED),
    ]
    producer.rollback()
    assert [state_of(db, i) for i in (in_flight, sent, pending)] == ["sending", "sent", "pending"]


def test_the_cancel_of_a_message_that_another_transaction_has_locked_is_requested(
    outbox: Outbox, db: psycopg.Connection, connect: Connect
) -> None:
    locked, free = (enqueue(db, owner="account-7") for _ in range(2))
    holder, producer = connect(), connect()
    holder.execute("SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [locked])
    assert outbox.on(producer).cancel_all(owner="account-7") == [
        Cancelled(locked, CancelResult.REQUESTED),
        Cancelled(free, CancelResult.CANCELLED),
    ]


@pytest.mark.slow
def test_many_locked_messages_cost_no_wait(outbox: Outbox, db: psycopg.Connection, connect: Connect) -> None:
    """As after a second click: the first call has locked every message until its commit."""
    for _ in range(600):
        enqueue(db, owner="account-7")
    first, second = connect(), connect()
    cancelled = outbox.on(first).cancel_all(owner="account-7")
    second.execute("SET lock_timeout = '1ms'")
    requested = outbox.on(second).cancel_all(owner="account-7")
    assert requested == [Cancelled(one.id, CancelResult.REQUESTED) for one in cancelled]
    assert len(requested) == 600


@pytest.mark.parametrize("target", [{}, {"owner": "account-7", "destination": ADA}], ids=["neither", "both"])
def test_either_an_owner_or_a_destination_is_given(
    outbox: Outbox, rolled_back: psycopg.Connection, target: dict[str, str]
) -> None:
    with pytest.raises(ArgumentError, match="owner: give either an owner or a destination"):
        outbox.on(rolled_back).cancel_all(**target)  # type: ignore[arg-type] # only texts
    names = ", ".join(f"{name} => %({name})s" for name in target)
    with pytest.raises(errors.InvalidParameterValue, match="either an owner or a destination"):
        rolled_back.execute(f"SELECT pgoutbox.cancel_all({names})".encode(), target)


def test_a_search_by_owner_uses_the_index(rolled_back: psycopg.Connection) -> None:
    rolled_back.execute("SET LOCAL enable_seqscan = off")
    plan = rolled_back.execute(
        "EXPLAIN SELECT m.id FROM pgoutbox.message_live AS m WHERE m.owner = 'account-7'"
    ).fetchall()
    assert any("message_live_owner_id_idx" in line for (line,) in plan)
