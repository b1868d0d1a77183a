"""A request to cancel concerns the message for which it was made, in the states for which it was made."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from pgoutbox import Context, Message, Outbox, Worker
from tests.support.outbox_actions import enqueue, running, settings_for, until_blocked
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.conftest import Connect

CALLS: Final = pytest.mark.parametrize(
    "call",
    [
        "enqueue('new', '1')",
        "enqueue('new', '1', queue => 'other')",
        "enqueue('new', '1', ordering_key => 'k')",
        "enqueue('new', '1', dedupe_key => 'k')",
        'enqueue_many(\'[{"topic": "new", "payload": 1}]\')',
    ],
)


def states(db: psycopg.Connection) -> list[tuple[object, ...]]:
    return db.execute("SELECT id, topic, state FROM pgoutbox.message_view ORDER BY created_at").fetchall()


def is_refused(db: psycopg.Connection, statement: str) -> psycopg.Error:
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as refused:
        db.execute(statement.encode())
    return refused.value


class Stubborn:
    """An outbox whose handler of `slow` ignores that it is cancelled, until the test lets it go on."""

    def __init__(self, dsn: str, **settings: object) -> None:
        self.outbox = Outbox(settings_for(dsn, **settings))
        self.is_called, self.go_on = asyncio.Event(), asyncio.Event()
        self.delivered: list[int] = []

        @self.outbox.handler("slow")
        async def slow(message: Message, ctx: Context) -> None:
            self.is_called.set()
            waiting = asyncio.ensure_future(self.go_on.wait())
            while not waiting.done():
                try:
                    await asyncio.shield(waiting)
                except asyncio.CancelledError:
                    continue

        @self.outbox.handler("new")
        async def new(message: Message, ctx: Context) -> None:
            self.delivered.append(message.id)


async def test_a_request_to_cancel_does_not_touch_a_new_message_that_gets_the_same_id(
    dsn: str, db: psycopg.Connection
) -> None:
    """An upgrade by logical replication copies the tables, and not the value of the sequence."""
    stubborn = Stubborn(dsn, concurrency=1)
    message_id = enqueue(db, "slow")
    async with running(Worker(stubborn.outbox)):
        await stubborn.is_called.wait()
        assert db.execute("SELECT pgoutbox.cancel(%s)", [message_id]).fetchall() == [("requested",)]
        stubborn.go_on.set()
        await until(lambda: states(db) == [(message_id, "slow", "sent")])
        db.execute("ALTER SEQUENCE pgoutbox.message_id_seq RESTART")
        assert enqueue(db, "new") == message_id
        await until(lambda: stubborn.delivered)
        await until(lambda: states(db)[1:] == [(message_id, "new", "sent")])


@CALLS
async def test_an_enqueue_refuses_an_id_that_was_drawn_before_the_last_maintenance(
    dsn: str, db: psycopg.Connection, call: str
) -> None:
    stubborn = Stubborn(dsn, maintenance_interval_seconds=3600)
    ids = [enqueue(db, "new") for _ in range(3)]
    await Worker(stubborn.outbox).run_once()
    assert stubborn.delivered == ids
    db.execute("ALTER SEQUENCE pgoutbox.message_id_seq RESTART")
    error = is_refused(db, f"SELECT pgoutbox.{call}")
    assert "SELECT setval('pgoutbox.message_id_seq'" in str(error)
    # The statement of the error repairs it.
    for statement in str(error).partition("run: ")[2].partition("; and")[0].split(";"):
        db.execute(statement.encode())
    assert enqueue(db, "new") == max(ids) + 1


@CALLS
async def test_an_enqueue_does_not_refuse_the_id_that_it_draws_during_a_maintenance(
    db: psycopg.Connection, connect: Connect, call: str
) -> None:
    """The lock stops the enqueue where it reads the last id that was drawn before the maintenance."""
    enqueue(db, "new")
    maintenance, producer = connect(), connect(autocommit=True)
    maintenance.execute("LOCK TABLE pgoutbox.id_floor")
    enqueued = asyncio.create_task(asyncio.to_thread(producer.execute, f"SELECT pgoutbox.{call}".encode()))
    await until_blocked(db, enqueued)
    maintenance.execute("SELECT pgoutbox._forget_requests()")
    maintenance.commit()
    await enqueued
    assert [state for _, _, state in states(db)] == ["pending", "pending"]


async def test_a_cancel_of_pending_messages_at_the_moment_of_a_claim_leaves_the_attempt_alone(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    message_id = enqueue(db, "new")
    claim = connect()
    # A claim locks the row first.
    claim.execute("SELECT FROM pgoutbox.message_live FOR UPDATE")
    answer = db.execute("SELECT pgoutbox.cancel(%s, '{pending}')", [message_id]).fetchall()
    claim.rollback()
    assert answer == [("pending",)]
    stubborn = Stubborn(dsn)
    async with running(Worker(stubborn.outbox)):
        await until(lambda: states(db) == [(message_id, "new", "sent")])
    assert stubborn.delivered == [message_id]


async def test_a_cancel_that_commits_after_its_attempt_has_ended_cancels_the_retry(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    outbox, calls = Outbox(settings_for(dsn)), list[int]()
    is_called, go_on = asyncio.Event(), asyncio.Event()

    @outbox.handler("fails")
    async def fails(message: Message, ctx: Context) -> None:
        calls.append(message.attempt_count)
        is_called.set()
        await go_on.wait()
        raise ValueError

    message_id = enqueue(db, "fails")
    canceller = connect()
    async with running(Worker(outbox)):
        await is_called.wait()
        assert canceller.execute("SELECT pgoutbox.cancel(%s)", [message_id]).fetchall() == [("requested",)]
        go_on.set()
        await until(lambda: states(db) == [(message_id, "fails", "pending")])
        canceller.commit()
        db.execute("SELECT pgoutbox.reschedule(%s)", [[message_id]])
        await until(lambda: states(db) == [(message_id, "fails", "cancelled")])
    assert calls == [1]
