"""Tests the slots: a limited number of concurrent attempts, each with exactly one outcome."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from pgoutbox.clock import elapsed_clock
from pgoutbox.handlers import Context, Handler
from pgoutbox.message import Message, Outcome, Sent, Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker.attempt import RELEASED, STOPPED, Attempt, Claim, Work
from pgoutbox.worker.payloads import LargeTexts
from pgoutbox.worker.pool import AttemptPool
from pgoutbox.worker.threads import thread_owner
from tests.support.outbox_actions import settings_for
from tests.support.waiting import until
from tests.support.worker_sql import run_state

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


async def hold(attempt: Attempt) -> None:
    """Every lease is valid."""


class Stand:
    """Slots whose attempts end when the test decides, with a record of their outcomes."""

    def __init__(self, *, concurrency: int = 2, timeout_seconds: float | None = None) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.running: dict[int, asyncio.Future[Outcome]] = {}
        self.most_running = 0
        self.attempt: Callable[[Work], Awaitable[Sequence[Outcome]]] = self.wait_for_the_test
        settings = settings_for("dbname=unused").model_copy(
            update={
                "concurrency": concurrency,
                "handler_timeout_seconds": timeout_seconds,
                "lease_seconds": timeout_seconds or 0,
            }
        )
        state = run_state(settings)
        self.telemetry = state.telemetry
        self.changed = state.progress
        self.slots = AttemptPool(state, self.run, large_texts=LargeTexts(state, keyring=None), on_outcome=self.note)

    async def run(self, work: Work) -> Sequence[Outcome]:
        return await self.attempt(work)

    def note(self, attempt: Attempt, ending: Outcome) -> None:
        assert attempt.message.id not in self.outcomes
        self.outcomes[attempt.message.id] = ending
        self.changed.set()

    async def wait_for_the_test(self, work: Work) -> Sequence[Outcome]:
        ids = [attempt.message.id for attempt in work]
        end = asyncio.get_running_loop().create_future()
        self.running.update(dict.fromkeys(ids, end))
        self.most_running = max(self.most_running, len(set(self.running.values())))
        self.changed.set()
        try:
            ending = await end
        finally:
            for message_id in ids:
                del self.running[message_id]
        return [ending] * len(ids)

    def put(self, *ids: int) -> None:
        self.slots.put([(attempt_of(message_id),) for message_id in ids])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


async def greet(message: Message[object], ctx: Context) -> None: ...


def attempt_of(message_id: int) -> Attempt:
    now = datetime(2024, 1, 1, tzinfo=UTC)
    message: Message[object] = Message(message_id, "greet", "default", None, None, {}, 1, 11, now, now, None)
    return Attempt(message, Handler("greet", greet), Claim(now), elapsed_clock(), hold)


async def test_the_number_of_concurrent_attempts_is_limited_and_their_order_kept() -> None:
    stand = Stand(concurrency=2)
    stand.put(1, 2, 3, 4)
    await stand.until(lambda: len(stand.running) == 2)
    assert list(stand.running) == [1, 2]
    assert (stand.slots.waiting_count, stand.slots.open_count) == (2, 4)
    stand.running[1].set_result(Sent())
    await stand.until(lambda: 3 in stand.running)
    for message_id in (2, 3):
        stand.running[message_id].set_result(Sent())
    await stand.until(lambda: 4 in stand.running)
    stand.running[4].set_result(Sent())
    await stand.until(lambda: len(stand.outcomes) == 4)
    assert stand.most_running == 2
    assert stand.slots.open_count == 0
    await stand.slots.stop()


async def test_attempts_that_end_at_once_need_one_slot() -> None:
    stand = Stand(concurrency=10)

    async def end_at_once(work: Work) -> Sequence[Outcome]:
        return [Sent()] * len(work)

    stand.attempt = end_at_once
    stand.put(*range(100))
    await stand.until(lambda: len(stand.outcomes) == 100)
    assert list(stand.outcomes) == list(range(100))
    await stand.slots.stop()


async def test_a_batch_counts_each_of_its_messages() -> None:
    stand = Stand(concurrency=1)
    stand.slots.put([[attempt_of(1), attempt_of(2), attempt_of(3)], [attempt_of(4)]])
    await stand.until(lambda: bool(stand.running))
    assert (stand.slots.waiting_count, stand.slots.open_count) == (1, 4)
    stand.running[1].set_result(Transient("busy"))
    await stand.until(lambda: 4 in stand.running)
    assert sorted(stand.outcomes) == [1, 2, 3]
    await stand.slots.stop()
    assert stand.outcomes[4] is STOPPED


async def test_waiting_messages_can_be_released() -> None:
    stand = Stand(concurrency=1)
    stand.put(1, 2, 3)
    await stand.until(lambda: 1 in stand.running)
    stand.slots.release_waiting()
    assert stand.outcomes == {2: RELEASED, 3: RELEASED}
    assert stand.slots.open_count == 1
    await stand.slots.stop()
    assert stand.outcomes[1] is STOPPED


async def test_messages_that_must_stay_are_not_released_and_keep_their_order() -> None:
    stand = Stand(concurrency=1)
    stand.slots.put(
        [[attempt_of(1)], [attempt_of(2)], [attempt_of(3), attempt_of(4)], [attempt_of(5)], [attempt_of(6)]]
    )
    await stand.until(lambda: 1 in stand.running)
    stand.slots.release_waiting(lambda attempt: attempt.message.id not in (2, 4, 6))
    assert stand.outcomes == {5: RELEASED}
    assert stand.slots.waiting_count == 4
    stand.running[1].set_result(Sent())
    await stand.until(lambda: 2 in stand.running)
    assert stand.slots.oldest_wait_seconds > 0
    await stand.slots.stop()


async def test_an_error_of_the_runner_is_the_outcome_and_the_slot_stays_usable() -> None:
    stand = Stand(concurrency=1)
    stand.put(1, 2)
    await stand.until(lambda: 1 in stand.running)
    stand.running[1].set_exception(ValueError("broken"))
    await stand.until(lambda: 2 in stand.running)
    outcome = stand.outcomes[1]
    assert isinstance(outcome, Transient)
    assert outcome.error == "ValueError: broken"
    await stand.slots.stop()


@pytest.mark.slow
async def test_an_attempt_past_its_timeout_is_ended_and_its_slot_stays_usable() -> None:
    stand = Stand(concurrency=1, timeout_seconds=1)
    stand.put(1, 2)
    await stand.until(lambda: 1 in stand.outcomes and 2 in stand.running)
    outcome = stand.outcomes[1]
    assert isinstance(outcome, Transient)
    assert outcome.error == "timed out after 1 s, outcome unknown"
    stand.running[2].set_result(Sent())
    await stand.until(lambda: 2 in stand.outcomes)
    assert stand.outcomes[2] == Sent()
    await stand.slots.stop()


async def test_a_running_thread_keeps_its_slot() -> None:
    stand = Stand(concurrency=3, timeout_seconds=0.5)
    thread: Future[object] = Future()
    thread.set_running_or_notify_cancel()

    async def run_in_thread(work: Work) -> Sequence[Outcome]:
        if work[0].message.id == 1:
            thread_owner.get().watch_thread(thread)
            await asyncio.wrap_future(thread)
        return await stand.wait_for_the_test(work)

    stand.attempt = run_in_thread
    stand.put(1)
    await stand.until(lambda: 1 in stand.outcomes)
    assert isinstance(stand.outcomes[1], Transient)
    assert stand.slots.capacity == 2
    assert stand.telemetry.counts[LogEvent.ATTEMPT_ABANDONED] == 1
    stand.put(2, 3, 4)
    await stand.until(lambda: len(stand.running) == 2)
    assert stand.slots.waiting_count == 1
    thread.set_result(None)
    await stand.until(lambda: stand.slots.capacity == 3 and len(stand.running) == 3)
    await stand.slots.stop()


async def test_a_handler_that_leaves_a_thread_after_it_has_ignored_its_cancellation_costs_one_slot() -> None:
    stand = Stand(concurrency=8, timeout_seconds=0.05)
    thread: Future[object] = Future()
    thread.set_running_or_notify_cancel()
    has_ended = asyncio.Event()

    async def begin_thread_late(work: Work) -> Sequence[Outcome]:
        try:
            return await stand.wait_for_the_test(work)
        except asyncio.CancelledError:
            await until(lambda: stand.telemetry.counts[LogEvent.ATTEMPT_ABANDONED])
            thread_owner.get().watch_thread(thread)
            has_ended.set()
            raise

    stand.attempt = begin_thread_late
    stand.put(1)
    await has_ended.wait()
    assert stand.slots.capacity == 7
    thread.set_result(None)
    await stand.until(lambda: stand.slots.capacity == 8)
    await stand.slots.stop()


@pytest.mark.slow
@pytest.mark.parametrize("passed", [LogEvent.ATTEMPT_OVERDUE, None], ids=["in its overtime", "in its time"])
async def test_a_thread_that_returned_during_a_blocked_event_loop_has_not_timed_out(
    passed: LogEvent | None,
) -> None:
    stand = Stand(concurrency=1, timeout_seconds=0.5)
    thread: Future[object] = Future()
    thread.set_running_or_notify_cancel()
    has_begun = asyncio.Event()

    async def run_in_thread(work: Work) -> Sequence[Outcome]:
        thread_owner.get().watch_thread(thread)
        has_begun.set()
        await asyncio.wrap_future(thread)
        return [Sent()]

    stand.attempt = run_in_thread
    stand.put(1)
    await has_begun.wait()
    if passed is not None:
        await until(lambda: stand.telemetry.counts[passed])
    (slot,) = stand.slots._slots
    assert slot.deadline is not None
    loop = asyncio.get_running_loop()
    while loop.time() < slot.deadline:
        pass  # Another handler blocks the event loop.
    thread.set_result(None)
    await stand.until(lambda: 1 in stand.outcomes)
    assert stand.outcomes[1] == Sent()
    assert stand.slots.capacity == 1
    await stand.slots.stop()


@pytest.mark.slow
async def test_every_thread_of_a_slot_may_return_during_a_blocked_event_loop() -> None:
    stand = Stand(concurrency=1, timeout_seconds=0.5)
    begun: list[Future[object]] = []

    async def run_in_thread(work: Work) -> Sequence[Outcome]:
        thread: Future[object] = Future()
        thread.set_running_or_notify_cancel()
        thread_owner.get().watch_thread(thread)
        begun.append(thread)
        await asyncio.wrap_future(thread)
        return [Sent()]

    stand.attempt = run_in_thread
    loop = asyncio.get_running_loop()
    for message_id in (1, 2):
        stand.put(message_id)
        await until(lambda: any(not thread.done() for thread in begun))
        (slot,) = stand.slots._slots
        assert slot.deadline is not None
        while loop.time() < slot.deadline:
            pass  # Another handler blocks the event loop.
        begun[-1].set_result(None)
        await stand.until(lambda: stand.slots.open_count == 0)
    assert stand.outcomes == {1: Sent(), 2: Sent()}
    await stand.slots.stop()


async def test_a_thread_that_begins_right_after_the_timeout_keeps_its_message() -> None:
    stand = Stand(concurrency=1, timeout_seconds=0.02)
    earlier: Future[object] = Future()
    earlier.set_result(None)
    later: Future[object] = Future()

    async def run_in_threads(work: Work) -> Sequence[Outcome]:
        thread_owner.get().watch_thread(earlier)
        (slot,) = stand.slots._slots
        await until(lambda: slot.has_returned)
        later.set_running_or_notify_cancel()
        thread_owner.get().watch_thread(later)
        await asyncio.wrap_future(later)
        return [Sent()]

    stand.attempt = run_in_threads
    stand.put(1)
    await until(lambda: stand.telemetry.counts[LogEvent.ATTEMPT_OVERDUE] or stand.outcomes)
    assert stand.outcomes == {}
    later.set_result(None)
    await stand.until(lambda: 1 in stand.outcomes)
    assert stand.outcomes[1] == Sent()
    await stand.slots.stop()


@pytest.mark.parametrize("count", [1, 5])
async def test_stopping_releases_running_and_waiting_messages(count: int) -> None:
    stand = Stand(concurrency=2)
    stand.put(*range(count))
    await stand.until(lambda: len(stand.running) == min(count, 2))
    await stand.slots.stop()
    assert stand.outcomes == {i: STOPPED if i < 2 else RELEASED for i in range(count)}
    assert stand.slots.open_count == 0


async def test_attempts_that_never_wait_let_the_event_loop_turn() -> None:
    stand = Stand(concurrency=2)
    in_one_turn = [0]

    async def work_for_a_while(work: Work) -> Sequence[Outcome]:
        in_one_turn[-1] += 1
        ends_at = time.monotonic() + 0.002
        while time.monotonic() < ends_at:
            pass
        return [Sent()]

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            in_one_turn.append(0)

    stand.attempt = work_for_a_while
    turns = asyncio.create_task(count_turns())
    stand.put(*range(1, 101))
    await stand.until(lambda: len(stand.outcomes) == 100)
    turns.cancel()
    assert max(in_one_turn) <= 20, "not all of them in one turn"
    await stand.slots.stop()
