"""Tests that a process hands over no message again that it has handed over, though its attempt counted as lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pgoutbox.worker.worker
from pgoutbox import Outbox
from pgoutbox.database.store import Store
from pgoutbox.worker import Worker
from tests.support.outbox_actions import (
    WatchedWorker,
    attempts_of,
    end_lapsed,
    enqueue,
    lapse,
    make_due,
    row_of,
    run_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg
    import pytest

    from pgoutbox.handlers import Context
    from pgoutbox.message import Message


class Gate:
    """An outbox whose handler waits, and counts how often it was called."""

    def __init__(self, dsn: str, *, is_open: bool) -> None:
        self.outbox = Outbox(settings_for(dsn))
        self.opened = asyncio.Event()
        self.calls: list[int] = []
        if is_open:
            self.opened.set()

        @self.outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            self.calls.append(message.attempt_count)
            await self.opened.wait()


def lose(db: psycopg.Connection, message_id: int) -> None:
    """Let another worker end the attempt as lost. The message is not due before `make_due`."""
    with db.transaction():
        lapse(db, message_id)
        assert [row.id for row in end_lapsed(db, worker="other")] == [message_id]
        db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 h' WHERE id = %s", [message_id])


def is_sent_once(db: psycopg.Connection, message_id: int, gate: Gate) -> bool:
    """Check a message whose second attempt was sent, and whose handler was called in the first one only."""
    assert [outcome for _, outcome, _ in attempts_of(db, message_id)] == ["lost"]
    assert row_of(db, message_id).attempt_count == 2
    return gate.calls == [1]


async def test_a_handler_goes_on_if_its_process_claims_the_message_of_its_lapsed_attempt(
    dsn: str, db: psycopg.Connection
) -> None:
    message_id, gate = enqueue(db), Gate(dsn, is_open=False)
    worker = WatchedWorker(gate.outbox)
    async with running(worker):
        await until(lambda: gate.calls)
        lose(db, message_id)
        make_due(db, message_id)
        run_of(worker).state.signals.poll_all_lanes()
        await until(lambda: state_of(db, message_id) == "sending")
        gate.opened.set()
        await until(lambda: state_of(db, message_id) == "sent")
    assert is_sent_once(db, message_id, gate)


async def test_a_hand_over_that_is_not_written_yet_is_written_by_the_next_attempt(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_id, gate = enqueue(db), Gate(dsn, is_open=True)
    arrived, claimed = asyncio.Event(), asyncio.Event()

    class SlowStore(Store):
        async def finish_sent(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
            arrived.set()
            await claimed.wait()
            return await super().finish_sent(*arguments, **options)

    monkeypatch.setattr(pgoutbox.worker.worker, "Store", SlowStore)
    worker = Worker(gate.outbox)
    async with running(worker):
        await arrived.wait()
        lose(db, message_id)
        make_due(db, message_id)
        run_of(worker).state.signals.poll_all_lanes()
        await until(lambda: state_of(db, message_id) == "sending")
        claimed.set()
        await until(lambda: state_of(db, message_id) == "sent")
    assert is_sent_once(db, message_id, gate)


async def test_a_hand_over_that_could_not_be_written_is_written_by_the_next_attempt(
    dsn: str, db: psycopg.Connection
) -> None:
    message_id, gate = enqueue(db), Gate(dsn, is_open=False)
    worker = Worker(gate.outbox)
    async with running(worker):
        await until(lambda: gate.calls)
        lose(db, message_id)
        gate.opened.set()
        await until(lambda: not run_of(worker).state.in_flight)
        assert state_of(db, message_id) == "pending"
        make_due(db, message_id)
        run_of(worker).state.signals.poll_all_lanes()
        await until(lambda: state_of(db, message_id) == "sent")
    assert is_sent_once(db, message_id, gate)


async def test_another_process_hands_the_message_over_again(dsn: str, db: psycopg.Connection) -> None:
    """It cannot know what the first one has done."""
    message_id, gates = enqueue(db), [Gate(dsn, is_open=False), Gate(dsn, is_open=True)]
    async with running(Worker(gates[0].outbox)):
        await until(lambda: gates[0].calls)
        lose(db, message_id)
        db.execute("UPDATE pgoutbox.message SET queue = 'apart' WHERE id = %s", [message_id])
        make_due(db, message_id)
        await Worker(gates[1].outbox, queues=["apart"]).run_once()
        assert (gates[1].calls, state_of(db, message_id)) == ([2], "sent")
        gates[0].opened.set()
    assert row_of(db, message_id).attempt_count == 2
