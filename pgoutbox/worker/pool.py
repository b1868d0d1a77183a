"""The attempt pool: runs a limited number of attempts at a time.

A slot of the pool is a task that runs one attempt after the other: a handler that returns at once costs no task, no
timer and no turn of the event loop. Each attempt has one result, which goes to `on_outcome`.

An attempt lasts at least as long as the threads that it started: see `worker/threads.py`. An attempt that cannot be
stopped (with a running thread, or ignoring its cancellation) keeps its message after its timeout: while it may still
succeed, no other attempt begins, and its real outcome counts. After the time of a lease the attempt ends as timed
out; if the process was suspended during it, that time begins again. The attempt then keeps its slot until it ends, so
that the number of running handlers never exceeds the limit.

A topic that holds a quarter of the slots in this way is suspended: the worker claims none of its messages until such a
handler ends. When half of the slots are held, the run stops with an error, because only a new process has all slots.
"""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

from pgoutbox.handlers import Handler
from pgoutbox.message import Outcome, SendFailure, Sent, Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.observability.measures import Attempted
from pgoutbox.text import describe
from pgoutbox.worker.attempt import RELEASED, STOPPED, Attempt, RunWork, Work
from pgoutbox.worker.payloads import LargeTexts
from pgoutbox.worker.run_state import RunState
from pgoutbox.worker.slots import Share, Slots, SlotsLostError
from pgoutbox.worker.threads import ThreadOwner, thread_owner

# Attempts that end at once yield to the event loop after this time, or after twice this time if others have waited.
_TURN_SECONDS = 0.005
# The time for the result of a thread to reach its task, and the minimum time for the code after it.
_RETURN_SECONDS = 0.1
# The mean duration is that of so many attempts.
_REMEMBERED = 10
# How long measurements are collected: one report of many costs a fraction of many reports.
_MEASURE_SECONDS = 0.1
_HALF_LOST = (
    "half of the slots are held by handlers that run on after their timeout, and only a new process has all slots: set "
    "timeouts in the libraries that these handlers call"
)


@dataclass(slots=True, eq=False, repr=False)
class _Slot(ThreadOwner):
    task: asyncio.Task[None]
    arm: Callable[[float], None]  # Looks at the deadline when it has come.
    deadline: float | None = None
    timeout_seconds: float | None = None
    is_overdue: bool = False  # The attempt has passed its timeout.
    timed_out: bool = False  # It was cancelled because of its timeout.
    has_returned: bool = False  # Its threads had ended when a deadline passed.
    overtime_count: int = 0  # A second one follows if the process was suspended during the first one.
    is_abandoned: bool = False  # It has its result, but its handler still runs.
    threads: list[Future[object]] = field(default_factory=list)  # The running ones, and the last one that ended.
    work: Work = ()  # Its messages, until they have a result.
    timed: Work = ()  # Those whose handler runs.

    @property
    def runs_in_thread(self) -> bool:
        return any(not thread.done() for thread in self.threads)

    def watch_thread(self, thread: Future[object], /) -> None:
        if self.threads:
            self.threads = [one for one in self.threads if not one.done()]
        self.threads.append(thread)

    def may_begin(self) -> Callable[[], bool]:
        work = self.work  # Empty if a task that its handler has left running calls after the end of its attempt.
        return lambda: (not work or self.work is work) and not self.is_overdue

    def pause_timeout(self) -> None:
        if self.deadline is not None and not self.is_overdue:
            self.deadline = math.inf

    def restart_timeout(self) -> None:
        if self.deadline is not None and self.timeout_seconds is not None and not self.is_overdue:
            self.deadline = asyncio.get_running_loop().time() + self.timeout_seconds
            self.arm(self.deadline)

    def time(self, attempts: Sequence[object]) -> None:
        self.timed = cast("Work", attempts)
        self.restart_timeout()

    async def threads_end(self) -> None:
        """Wait for the end of all threads. A cancelled wait does not cancel them."""
        while self.runs_in_thread:
            await asyncio.wait([asyncio.wrap_future(_end_of(thread)) for thread in self.threads])


class AttemptPool:
    """Runs up to `concurrency` attempts at once, in the order of their arrival, by `run_work`.

    With `slots` it shares them with the workers of other databases.
    """

    def __init__(
        self,
        run: RunState,
        run_work: RunWork,
        *,
        large_texts: LargeTexts,
        on_outcome: Callable[[Attempt, Outcome], None],
        slots: Slots | None = None,
    ) -> None:
        self._run = run
        self._run_work = run_work
        self._large_texts = large_texts
        self._on_outcome = on_outcome
        self._concurrency = run.settings.concurrency
        self._topic_limit = max(1, self._concurrency // 4)
        self._default_timeout_seconds = run.settings.handler_timeout_seconds
        self._overtime_seconds = run.settings.lease_seconds
        self._telemetry = run.telemetry
        self._measured: list[Attempted] | None = None if run.telemetry.measures is None else []
        self._ready: deque[tuple[Work, float]] = deque()
        self.waiting_count = 0
        """Number of messages that no handler has taken yet."""
        self.running_count = 0
        """Number of messages in running handlers."""
        self._message_seconds = 0.0  # The mean duration of the last messages. A new worker takes them for fast.
        self._remembered_count = 0
        self.work_size = 1
        """How many messages a free slot is likely to take at once, judged by the last ones."""
        self._outlived: list[str] = []  # The topic of each slot whose handler outlived its attempt.
        self._slots: list[_Slot] = []
        self._shared = slots
        self._share = None if slots is None else Share(slots, self._use_slot)
        self._late: Sequence[asyncio.Task[None]] = ()  # They wait for handlers that run on after the end of the pool.
        self._idle: deque[asyncio.Future[None]] = deque()
        self._waking = False
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._turn_ends_at = 0.0
        self._has_yielded = True  # Since the turn began.

    @property
    def capacity(self) -> int:
        """The number of attempts that can run at once, without slots of handlers that outlived their attempts."""
        own = self._concurrency - len(self._outlived)
        return own if self._share is None else min(own, self._share.used_count + self._shared_free_count)

    @property
    def outlived_count(self) -> int:
        """Number of slots of handlers that outlived their attempts."""
        return len(self._outlived)

    @property
    def has_running_handlers(self) -> bool:
        """Whether a handler still runs after `stop`: in a thread, or ignoring its cancellation."""
        return any(slot.runs_in_thread or not slot.task.done() for slot in self._slots)

    @property
    def open_count(self) -> int:
        """Number of messages without an outcome."""
        return self.waiting_count + self.running_count

    @property
    def oldest_wait_seconds(self) -> float:
        """The waiting time of the next message."""
        return asyncio.get_running_loop().time() - self._ready[0][1] if self._ready else 0.0

    @property
    def free_count(self) -> int:
        """The number of free slots."""
        own = self._concurrency - len(self._slots) + len(self._idle)
        return own if self._share is None else min(own, self._shared_free_count)

    @property
    def _shared_free_count(self) -> int:
        """The number of slots that it may take now. Without one, the first message waits here for its turn."""
        least = 0 if self.open_count else 1
        return least if self._share is None else max(self._share.free_count, least)

    def turnover(self, seconds: float) -> int:
        """Return how many messages the slots are likely to begin within this time, by the duration of the last ones."""
        return int(self.capacity * seconds / max(self._message_seconds, 1e-6))

    def work_of(self, task: asyncio.Task[object]) -> Work:
        """Return the messages whose handler runs in this task. Any thread may call it."""
        return next((slot.work for slot in self._slots if slot.task is task), ())

    def put(self, works: Sequence[Work]) -> None:
        """Add work; it starts as soon as a slot is free."""
        now = asyncio.get_running_loop().time()
        for work in works:
            self._ready.append((work, now))
            self.waiting_count += len(work)
        if self._stopping:
            self.release_waiting()  # Their claim was in transit when the run stopped.
        self._wake_one()

    def release_waiting(self, may_release: Callable[[Attempt], bool] | None = None) -> None:
        """Release messages that no handler has taken yet. `may_release` must allow all messages of a unit of work."""
        waiting, self._ready = self._ready, deque()
        for work, put_at in waiting:
            if may_release is None or all(map(may_release, work)):
                self.waiting_count -= len(work)
                for attempt in work:
                    self._end(attempt, RELEASED)
            else:
                self._ready.append((work, put_at))

    async def stop(self) -> None:
        """Cancel running handlers and end the slots.

        Handlers that can be cancelled release their messages; those of the others stay in flight without an outcome.
        """
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = -math.inf  # No deadline counts any more.
        self.release_waiting()
        tasks = [slot.task for slot in self._slots]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if self._share is not None and self._shared is not None:
            self._leave_slots(self._share, self._shared)
        self._measure()

    def _leave_slots(self, share: Share, shared: Slots) -> None:
        """Give the shared slots back. Handlers that still run keep theirs, and the shared threads that they block."""

        async def return_late(slot: _Slot) -> None:
            await asyncio.wait([slot.task])
            await slot.threads_end()
            share.return_kept()

        hung = [slot for slot in self._slots if slot.runs_in_thread or not slot.task.done()]
        share.close(kept_count=len(hung))
        self._late = [asyncio.create_task(return_late(slot), name="pgoutbox-late") for slot in hung]
        if hung and shared.has_lost_half:
            self._run.stop(SlotsLostError(_HALF_LOST))

    def _note_measure(self, work: Work, began_at: float, ended_at: float, measured: list[Attempted]) -> None:
        if not measured:
            asyncio.get_running_loop().call_later(_MEASURE_SECONDS, self._measure)
        available = tuple([attempt.message.available_at for attempt in work])
        measured.append((work[0].message.topic, available, began_at, ended_at))

    def _measure(self) -> None:
        if self._measured and self._telemetry.measures is not None:
            attempts, self._measured = self._measured, []
            self._telemetry.measures.attempted(attempts)

    def _wake_one(self) -> None:
        # Wake one slot at a time: it wakes the next one if more work waits.
        if self._waking or not self._ready:
            return
        while self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                self._waking = True
                waiter.set_result(None)
                return
        if len(self._slots) < self._concurrency:
            self._waking = True
            task = asyncio.create_task(self._serve(), name=f"pgoutbox-slot-{len(self._slots)}")
            self._slots.append(_Slot(task, self._arm_timer))

    async def _serve(self) -> None:
        task = asyncio.current_task()
        slot = next(slot for slot in self._slots if slot.task is task)
        loop = asyncio.get_running_loop()
        share = self._share
        thread_owner.set(slot)
        while not self._stopping:
            self._waking = False
            now = loop.time()
            while self._ready and (share is None or share.take()):
                work, _ = self._ready.popleft()
                size = len(work)
                self.waiting_count -= size
                self.running_count += size
                if not self._waking:
                    self._wake_one()
                limit = work[0].handler.max_size
                if work[0].is_incomplete:
                    limit = None
                    await self._attempt_incomplete(slot, work)
                else:
                    await self._attempt(slot, work, now)
                began_at, now = now, loop.time()
                self._remembered_count += self._remembered_count < _REMEMBERED
                self._message_seconds += ((now - began_at) / size - self._message_seconds) / self._remembered_count
                # It grows with the batches that are found: those of a rare topic are small.
                self.work_size = 1 if limit is None else min(limit, 2 * size + 1)
                if self._measured is not None:
                    self._note_measure(work, began_at, now, self._measured)
                if now > self._turn_ends_at:
                    if not self._has_yielded:
                        await asyncio.sleep(0)  # Let claims, finishes and the doorbell run.
                        now = loop.time()
                    self._turn_ends_at = now + _TURN_SECONDS
                    self._has_yielded = False
                    loop.call_soon(self._note_yield)
                if share is not None:
                    share.give_back()
            if not self._stopping:
                waiter = loop.create_future()
                self._idle.append(waiter)
                await waiter

    def _note_yield(self) -> None:
        self._has_yielded = True

    def _use_slot(self) -> None:
        """Use a shared slot that the pool has waited for."""
        if self._ready:
            self._wake_one()
        elif self._share is not None:
            self._share.leave()

    async def _attempt_incomplete(self, slot: _Slot, work: Work) -> None:
        """Read what the claim has left out of an attempt, and run it: its timeout begins after the wait for memory."""
        (attempt,) = slot.work = work
        slot.threads = []
        try:
            result = await self._large_texts.read(attempt)
            if result is None:
                await self._attempt(slot, work, asyncio.get_running_loop().time())
            else:
                self._end_running(slot, [result])
        except asyncio.CancelledError:
            self._end_running(slot, [RELEASED])
            raise
        except Exception as error:  # noqa: BLE001 - the slot serves other messages too
            self._end_running(slot, [Transient(describe(error))])
        finally:
            self._large_texts.forget(attempt)

    async def _attempt(self, slot: _Slot, work: Work, now: float) -> None:
        slot.timeout_seconds = timeout = work[0].handler.timeout_seconds or self._default_timeout_seconds
        slot.work = slot.timed = work
        slot.threads = []
        slot.has_returned = False
        slot.overtime_count = 0
        if timeout is not None:
            slot.deadline = now + timeout
            self._arm_timer(slot.deadline)
        results: Sequence[Outcome] | None = None
        try:
            results = await self._run_work(work)
            if slot.threads and slot.runs_in_thread:
                await slot.threads_end()
        except asyncio.CancelledError:
            if not slot.timed_out:
                begun = None if slot.runs_in_thread else STOPPED
                stopped = [begun if attempt.has_begun else RELEASED for attempt in work]
                known = zip(results or stopped, stopped, strict=True)
                self._end_running(slot, [r if isinstance(r, Sent) else s for r, s in known])
                raise
            self._end_running(slot, results or self._timed_out(slot))
        except Exception as error:  # noqa: BLE001 - the slot serves other messages too
            self._end_running(slot, [Transient(describe(error))] * len(work))
        else:
            self._end_running(slot, results)
        slot.deadline = None
        if slot.is_overdue:
            await self._outlive(slot, work)

    def _end_running(self, slot: _Slot, results: Sequence[Outcome | None]) -> None:
        """Note the outcomes of its messages. One without an outcome runs on, and the run abandons it."""
        work, slot.work = slot.work, ()
        if work:
            self.running_count -= len(work)
            for attempt, result in zip(work, results, strict=True):
                if result is not None:
                    self._end(attempt, result)
            if not (self.running_count or self.waiting_count):
                self._run.note_progress()  # A stop waits for the end of all.

    def _end(self, attempt: Attempt, result: Outcome) -> None:
        if not attempt.done:
            attempt.done = True
            attempt.sent = isinstance(result, Sent) and not attempt.is_written
            self._on_outcome(attempt, result)

    def _timed_out(self, slot: _Slot) -> Sequence[Outcome]:
        failure = SendFailure(f"timed out after {slot.timeout_seconds:g} s, outcome unknown", unknown=True)
        timed = {*slot.timed}
        return [failure if attempt in timed else RELEASED for attempt in slot.work]

    async def _outlive(self, slot: _Slot, work: Work) -> None:
        """Free the slot for the next attempt, after the handler that passed its timeout has ended."""
        slot.is_overdue = slot.timed_out = False
        while slot.task.uncancel():
            pass
        if slot.runs_in_thread and not slot.is_abandoned:
            self._abandon(slot, work)
        if slot.is_abandoned:
            try:
                await slot.threads_end()
            finally:
                slot.is_abandoned = False
                self._note_return(work[0].handler)
                self._run.note_progress()

    def _abandon(self, slot: _Slot, work: Work) -> None:
        slot.is_abandoned = True
        topic = work[0].message.topic
        self._outlived.append(topic)
        if self._shared is not None:
            self._shared.lost_count += 1
        self._report(logging.ERROR, LogEvent.ATTEMPT_ABANDONED, "attempt timed out, its handler still runs", slot.timed)
        if self._run.stopping.is_set():
            return
        if self._has_lost_half:
            topics = ", ".join(sorted(set(self._outlived)))
            self._run.stop(SlotsLostError(f"{_HALF_LOST}; topics: {topics}"))
        elif self._may_suspend(topic):
            for name in work[0].handler.handled:
                self._run.topics.remove(name)
            text = "topic suspended: a quarter of the slots are held by its handlers, which run on after their timeout"
            self._telemetry.report(logging.ERROR, LogEvent.TOPIC_SUSPENDED, text, topic=topic)
            self.release_waiting(lambda attempt: attempt.message.topic == topic)

    @property
    def _has_lost_half(self) -> bool:
        if self._shared is None:
            return len(self._outlived) * 2 >= self._concurrency
        return self._shared.has_lost_half

    def _may_suspend(self, topic: str) -> bool:
        # A worker without another topic to deliver goes on until it has lost half of its slots: it must not idle.
        topics = self._run.topics
        # Messages of hooks and alerts follow from those of others, and those of other queues go to other workers.
        has_other = any(other != topic and other in self._run.own_topics for other in topics)
        return topic in topics and has_other and self._outlived.count(topic) >= self._topic_limit

    def _note_return(self, handler: Handler) -> None:
        topic = handler.topic
        self._outlived.remove(topic)
        if self._shared is not None:
            self._shared.lost_count -= 1
        if topic not in self._run.topics and self._outlived.count(topic) < self._topic_limit:
            for name in handler.handled:
                insort(self._run.topics, name)
            self._run.kernel.sweep()

    def _arm_timer(self, at: float) -> None:
        if at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = asyncio.get_running_loop().call_at(at, self._end_overdue)

    def _end_overdue(self) -> None:
        now = asyncio.get_running_loop().time()
        for slot in self._slots:
            if slot.deadline is not None and slot.deadline <= now:
                was_away = now - slot.deadline > _RETURN_SECONDS
                slot.deadline = None if slot.is_abandoned else now + self._overtime_seconds
                for attempt in slot.work:
                    self._run.kernel.forget_suspect(attempt.message_id)
                self._overrun(slot, was_away=was_away)
        deadlines = [slot.deadline for slot in self._slots if slot.deadline is not None]
        self._timer_at = math.inf
        if deadlines:
            self._arm_timer(min(deadlines))

    def _overrun(self, slot: _Slot, *, was_away: bool) -> None:
        """Handle a passed deadline: first of the attempt, then of its overtime.

        `was_away` means that the process was suspended: its threads had no time either.
        """
        work = slot.work
        if slot.threads and not slot.runs_in_thread and not slot.has_returned:
            # After a blocked event loop the result of the thread may still be on its way to the task.
            slot.has_returned = slot.is_overdue = True
            slot.deadline = asyncio.get_running_loop().time() + _RETURN_SECONDS
        elif slot.runs_in_thread and slot.overtime_count < (2 if was_away else 1):
            slot.overtime_count += 1
            if slot.overtime_count == 1:
                slot.is_overdue = True
                text = "handler still runs in its thread after its timeout"
                self._report(logging.WARNING, LogEvent.ATTEMPT_OVERDUE, text, slot.timed)
        elif not slot.timed_out:
            slot.is_overdue = slot.timed_out = True
            slot.task.cancel()
        elif work:
            self._end_running(slot, self._timed_out(slot))  # The handler ignores its cancellation.
            self._abandon(slot, work)

    def _report(self, level: int, event: LogEvent, text: str, work: Work) -> None:
        for attempt in work:
            message = attempt.message
            self._telemetry.report(
                level, event, text, message_id=message.id, topic=message.topic, attempt_count=attempt.attempt_count
            )


def _end_of(thread: Future[object]) -> Future[None]:
    """Return a future that is done when the thread ends, with any result."""
    end: Future[None] = Future()

    def finish(_: Future[object]) -> None:
        if end.set_running_or_notify_cancel():
            end.set_result(None)

    thread.add_done_callback(finish)
    return end
