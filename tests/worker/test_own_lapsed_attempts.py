"""Tests that a process hands over no message again that it has handed over, though its attempt counted as lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import pgoutbox.worker.run
from pgoutbox import Outbox
from pgoutbox.database.store import Store
from pgoutbox.message import Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.operations import Operator
from pgoutbox.worker import Worker
from tests.support.old_worker import WatchedWorker, claim, end_lapsed, run_of
from tests.support.outbox_actions import attempts_of, enqueue, lapse, make_due, row_of, running, settings_for, state_of
from tests.support.waiting import until

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


class SlowFinish:
    """Finishes as sent that wait for `may_go_on`, as long as `is_slow`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_slow: bool) -> None:
        self.is_slow = is_slow
        self.arrived, self.may_go_on = asyncio.Event(), asyncio.Event()
        finish_sent = Store.finish_sent

        async def wait(store: Store, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
            if self.is_slow:
                self.arrived.set()
                await self.may_go_on.wait()
            return await finish_sent(store, *arguments, **options)

        monkeypatch.setattr(Store, "finish_sent", wait)


def lose(db: psycopg.Connection, message_id: int) -> None:
    """Let another worker end the attempt as lost. The message is not due before `make_due`."""
    with db.transaction():
        lapse(db, message_id)
        assert [row.id for row in end_lapsed(db, worker="other")] == [message_id]
        db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 h' WHERE id = %s", [message_id])


def claim_again(db: psycopg.Connection, message_id: int, worker: Worker) -> None:
    """Make the message due, and wake the worker."""
    make_due(db, message_id)
    run_of(worker).state.signals.poll_all_lanes()


def counts_in_flight(worker: Worker) -> list[int]:
    return [attempt.attempt_count for attempt in run_of(worker).state.in_flight.values()]


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


async def test_a_hand_over_that_is_not_written_yet_is_written_by_the_next_attempt(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_id, gate = enqueue(db), Gate(dsn, is_open=True)
    finish = SlowFinish(monkeypatch, is_slow=True)
    worker = Worker(gate.outbox)
    async with running(worker):
        await finish.arrived.wait()
        lose(db, message_id)
        claim_again(db, message_id, worker)
        await until(lambda: state_of(db, message_id) == "sending")
        finish.may_go_on.set()
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


async def test_a_remembered_hand_over_survives_a_second_loss(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_id, gate = enqueue(db), Gate(dsn, is_open=False)
    finish = SlowFinish(monkeypatch, is_slow=False)
    worker = Worker(gate.outbox)
    async with running(worker):
        await until(lambda: gate.calls)
        lose(db, message_id)
        gate.opened.set()
        await until(lambda: not run_of(worker).state.in_flight)
        finish.is_slow = True
        claim_again(db, message_id, worker)
        await finish.arrived.wait()
        # Another worker takes the suspect over, and dies.
        lapse(db, message_id)
        assert [(row.id, row.attempt_count) for row in claim(db, worker="other")] == [(message_id, 3)]
        lapse(db, message_id)
        run_of(worker).state.signals.poll_all_lanes()
        await until(lambda: counts_in_flight(worker) == [4])
        finish.may_go_on.set()
        await until(lambda: state_of(db, message_id) == "sent")
    assert gate.calls == [1]


async def test_a_finish_whose_answer_comes_after_the_next_claim_leaves_that_attempt(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the process would forget the attempt and delete its claim, and nobody would find the message again."""
    message_id, gate = enqueue(db), Gate(dsn, is_open=False)
    worker = Worker(gate.outbox)
    states: list[object] = []

    class SlowStore(Store):
        async def current_states(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
            states.append(await super().current_states(*arguments, **options))
            if len(states) == 1:
                claim_again(db, message_id, worker)
                await until(lambda: counts_in_flight(worker) == [2])
            return states[-1]

    monkeypatch.setattr(pgoutbox.worker.run, "Store", SlowStore)
    async with running(worker):
        await until(lambda: gate.calls)
        lose(db, message_id)
        gate.opened.set()
        await until(lambda: state_of(db, message_id) == "sent")
    assert states[0] == {}
    assert is_sent_once(db, message_id, gate)


async def test_a_lost_answer_to_a_claim_keeps_the_claim_of_a_message_that_still_runs(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, gate = enqueue(db), Gate(dsn, is_open=False)
    losses: list[int] = []

    class LossyStore(Store):
        async def claim(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
            rows = await super().claim(*arguments, **options)
            if len(rows) == 2 and not losses:
                losses.append(len(rows))
                raise psycopg.OperationalError("the answer was lost")
            return rows

    monkeypatch.setattr(pgoutbox.worker.run, "Store", LossyStore)
    worker = Worker(gate.outbox)
    async with running(worker):
        await until(lambda: gate.calls)
        lose(db, first)
        with db.transaction():
            other = enqueue(db)
            db.execute("UPDATE pgoutbox.message SET lane = 1, attempt_count = 1 WHERE id = %s", [other])
            make_due(db, first)
        run_of(worker).state.signals.poll_all_lanes()
        await until(lambda: losses and len(gate.calls) == 2)
        gate.opened.set()
        await until(lambda: not run_of(worker).state.in_flight)
    lapse(db, first)
    await Worker(gate.outbox).run_once()
    assert [state_of(db, message_id) for message_id in (first, other)] == ["sent", "sent"]


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


async def test_an_attempt_that_is_taken_over_as_superseded_hands_nothing_over(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a slot, is lost and claimed again, and a newer message commits between snapshot and commit."""
    outbox, opened = Outbox(settings_for(dsn, concurrency=1)), asyncio.Event()
    calls: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        calls.append(message.id)
        if message.id == blocker:
            await opened.wait()

    newer: list[int] = []
    marked: list[int] = []

    class RacingStore(Store):
        async def mark_superseded(self, rows: Any) -> Any:  # noqa: ANN401 - passed on
            if not newer and any((row.id, row.attempt_count) == (old, 2) for row in rows):
                newer.append(enqueue(db, coalesce_key="k"))
            answer = await super().mark_superseded(rows)
            marked.extend(row.id for row in answer if row.superseded)
            return answer

    monkeypatch.setattr(pgoutbox.worker.run, "Store", RacingStore)
    with db.transaction():
        blocker, old = enqueue(db), enqueue(db, coalesce_key="k")
    worker = Worker(outbox)

    def look_on() -> bool:
        """Let the worker claim more than it has slots for."""
        run_of(worker).poll_loop.surplus = 50
        run_of(worker).state.signals.poll_all_lanes()
        run_of(worker).state.signals.progress.set()
        return True

    async with running(worker):
        await until(lambda: calls == [blocker])
        await until(lambda: look_on() and state_of(db, old) == "sending")
        lose(db, old)
        make_due(db, old)
        await until(lambda: look_on() and marked)
        opened.set()
        await until(lambda: state_of(db, newer[0]) == "sent")
    assert old not in calls
    assert state_of(db, old) == "skipped"


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
