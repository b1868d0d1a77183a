"""Tests that a process hands over no message again that it has handed over, though its attempt counted as lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Outbox
from pgoutbox.message import AttemptOutcome, Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.operations import Correction, Operator
from pgoutbox.worker import Worker
from tests.support.outbox_actions import (
    attempts_of,
    begin,
    enqueue,
    lapse,
    make_due,
    row_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until
from tests.support.worker_sql import End, WatchedWorker, end_lapsed, finish, run_of

if TYPE_CHECKING:
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


def claim_again(db: psycopg.Connection, message_id: int, worker: Worker) -> None:
    """Make the message due, and wake the worker."""
    make_due(db, message_id)
    run_of(worker).kernel.sweep()


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
        claim_again(db, message_id, worker)
        await until(lambda: state_of(db, message_id) == "sending")
        gate.opened.set()
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
        claim_again(db, message_id, worker)
        await until(lambda: state_of(db, message_id) == "sent")
    assert is_sent_once(db, message_id, gate)


@pytest.mark.slow
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


@pytest.mark.parametrize("is_over", [True, False], ids=["its handler has ended", "its handler runs"])
async def test_a_message_that_a_person_corrects_is_handed_over_to_its_new_destination(
    dsn: str, db: psycopg.Connection, *, is_over: bool
) -> None:
    outbox, opened = Outbox(settings_for(dsn)), asyncio.Event()
    destinations: list[str | None] = []

    @outbox.handler("greet", on_unknown="hold")
    async def greet(message: Message, ctx: Context) -> None:
        destinations.append(message.destination)
        if len(destinations) == 1:
            await opened.wait()

    message_id = enqueue(db, destination="mailto:ann@example.org")
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: destinations)
        with db.transaction():
            lapse(db, message_id)
            assert [row.state for row in end_lapsed(db, worker="other", hold_topics=["greet"])] == ["failed"]
        if is_over:
            opened.set()
            await until(lambda: not run_of(worker).state.in_flight)
        assert Operator(db).correct(message_id, {"destination": "mailto:ben@example.org"}).is_done
        await until(lambda: state_of(db, message_id) == "sent")
        opened.set()
    assert destinations == ["mailto:ann@example.org", "mailto:ben@example.org"]


@pytest.mark.parametrize("act", ["correct", "redrive"])
async def test_a_message_is_handed_over_again_if_a_person_acts_before_an_attempt_of_another_worker(
    dsn: str, db: psycopg.Connection, act: str
) -> None:
    """The other attempt gives nothing back. Only the act raises `max_attempts`."""
    message_id, gate = enqueue(db), Gate(dsn, is_open=False)
    worker = Worker(gate.outbox)
    last = 2
    async with running(worker):
        await until(lambda: gate.calls)
        lose(db, message_id)
        gate.opened.set()
        await until(lambda: not run_of(worker).state.in_flight)
        with db.transaction():  # At once: the worker may not claim in between.
            if act == "correct":
                assert Operator(db).correct(message_id, Correction(payload={"to": "ann"})).is_done
            else:
                begin(db, message_id, worker="other")
                finish(db, End(message_id, last, AttemptOutcome.FAILED, "no"), worker="other")
                assert Operator(db).redrive(message_id).is_done
                last += 1
            begin(db, message_id, worker="other")
            finish(db, End(message_id, last, AttemptOutcome.RETRY, delay_seconds=3600), worker="other")
        claim_again(db, message_id, worker)
        await until(lambda: state_of(db, message_id) == "sent")
    assert gate.calls == [1, last + 1]


@pytest.mark.parametrize("outcome", [None, Transient("busy")], ids=["sent", "retry"])
async def test_the_outcome_of_a_lost_attempt_is_reported_as_lost(
    dsn: str, db: psycopg.Connection, outcome: Transient | None
) -> None:
    outbox, opened = Outbox(settings_for(dsn)), asyncio.Event()
    calls: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Transient | None:
        calls.append(message.id)
        await opened.wait()
        return outcome

    message_id = enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: calls)
        lose(db, message_id)
        opened.set()
        await until(lambda: not run_of(worker).state.in_flight)
    counts = worker.telemetry.counts
    assert (counts[LogEvent.LEASE_LOST], counts[LogEvent.RETRY], counts[LogEvent.SENT]) == (1, 0, 0)
