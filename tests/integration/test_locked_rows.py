"""A row that somebody has locked delays its own outcome and no other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgoutbox import Context, Message, Outbox, sql
from pgoutbox.link import Link
from pgoutbox.message import State
from pgoutbox.store import Store, Verdict
from pgoutbox.worker import Worker
from tests.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    cancel,
    claim,
    enqueue,
    finish,
    row_of,
    running,
    settings_for,
    state_of,
    until_blocked,
)
from tests.waiting import until

if TYPE_CHECKING:
    from tests.conftest import Connect


async def test_a_row_that_a_transaction_cancels_for_long_keeps_no_others_in_flight(dsn: str, connect: Connect) -> None:
    db, canceller = connect(autocommit=True), connect()
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if message.id == locked:
            assert cancel(canceller, locked) == "requested"

    locked, *others = (enqueue(db) for _ in range(3))
    async with running(Worker(outbox)):
        await until(lambda: {state_of(db, i) for i in others} == {State.SENT})
        later = enqueue(db)
        await until(lambda: state_of(db, later) == State.SENT)
        assert state_of(db, locked) == State.SENDING
        canceller.commit()
        await until(lambda: state_of(db, locked) == State.SENT)
    assert attempts_of(db, locked) == []


async def test_a_row_that_goes_while_its_finish_waits_for_it_keeps_no_others_in_flight(
    dsn: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to another partition: whoever waited for the lock gets an error instead of the row."""
    monkeypatch.setattr(sql, "FINISH_SENT_IF_HELD", sql.FINISH_SENT_IF_HELD.replace("20ms", f"{PATIENCE_SECONDS}s"))
    db, other = connect(autocommit=True), connect()
    first, gone, last = (enqueue(db) for _ in range(3))
    claim(db)
    assert finish(other, Verdict(gone, 1, "failed", "by somebody else")) == {gone: State.FAILED}
    store = Store(settings_for(dsn, lock_timeout_seconds=PATIENCE_SECONDS), worker="worker-1")
    finishing = asyncio.create_task(store.finish_sent([first, gone, last], [1, 1, 1], {"greet"}))
    try:
        await until_blocked(db, finishing)
        other.commit()
        assert await finishing == {first: State.SENT, last: State.SENT}
    finally:
        await store.close()
    assert state_of(db, gone) == State.FAILED


async def test_a_claim_is_released_if_the_question_behind_it_meets_a_lock(
    dsn: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is committed by then: its attempts must neither wait for the end of their leases nor be used up."""
    db, locker = connect(autocommit=True), connect()
    fetch = Link.fetch
    errors: list[psycopg.Error] = []

    async def meeting_a_lock(self: Link, statement: Any, parameters: Any, *, first: Any = None) -> Any:  # noqa: ANN401 - passed on
        if statement != sql.OVERTAKEN or errors:
            return await fetch(self, statement, parameters, first=first)
        locker.execute("LOCK TABLE pgoutbox.coalesce IN ACCESS EXCLUSIVE MODE")
        try:
            return await fetch(self, statement, parameters, first=first)
        except psycopg.errors.LockNotAvailable as error:
            errors.append(error)
            raise
        finally:
            locker.rollback()

    monkeypatch.setattr(Link, "fetch", meeting_a_lock)
    outbox = Outbox(settings_for(dsn, lock_timeout_seconds=0.1))
    delivered: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.append(message.id)

    message_id = enqueue(db, coalesce_key="k")
    attempts_left = row_of(db, message_id).max_attempts
    await Worker(outbox).run_once()
    assert errors
    assert delivered == [message_id]
    row = row_of(db, message_id)
    assert row.max_attempts - row.attempt_count == attempts_left - 1
    assert "lost" not in [outcome for _, outcome, _ in attempts_of(db, message_id)]
