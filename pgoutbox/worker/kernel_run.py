"""A run of a worker whose messages are claimed and finished by the kernel."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, cast

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import ClaimedRow, DueRow, FinishRequest, LapsedRow
from pgoutbox.errors import PgOutboxError
from pgoutbox.kernel import run as kernel
from pgoutbox.kernel.lanes import Lane, fresh_and_retries
from pgoutbox.kernel.seams import Ended, Row, Step
from pgoutbox.message import Sent, State
from pgoutbox.worker.attempt import Attempt, AttemptResult
from pgoutbox.worker.backoff import Backoff
from pgoutbox.worker.doorbell import Doorbell, LockAnswer
from pgoutbox.worker.worker import _Run

if TYPE_CHECKING:
    from pgoutbox.worker.worker import Worker

_POLL_WITHOUT_LISTENER_SECONDS = 1.0
_RELEASE_WAITING_SECONDS = 1.0
_FOREIGN_WORK_SECONDS = 1.0


class _Attempts:
    def __init__(self, run: KernelRun) -> None:
        self._run = run
        self._results: deque[tuple[Attempt, AttemptResult]] = run.finisher._results
        self.in_flight = run.state.in_flight

    def room(self) -> int:
        run = self._run
        pool, batch = run.pool, run.state.settings.batch_size
        if pool.capacity == 0:
            return 0
        room = pool.capacity + batch - pool.open_count
        left = pool.capacity + 3 * batch - len(self.in_flight)
        if room * 2 < min(batch, pool.capacity + batch):
            return 0
        return max(0, min(batch, room, left, (pool.capacity + batch + 1) // 2))

    async def begin(self, rows: Sequence[Row], began_at: float) -> None:
        claimed = [ClaimedRow._make((*row[:16], row[18], row[16], False)) for row in rows]
        leased_at = elapsed_clock() - (self._run.kernel_clock() - began_at)
        for _, same in groupby(claimed, key=lambda row: row.claimed_at if row.state == "sending" else None):
            await self._run._loader.take_over(list(same), leased_at)
        self._run.link.note_answered(claimed)

    def take_ended(self, most: int) -> list[Ended]:
        finisher = self._run.finisher
        ended: list[Ended] = []
        while self._results and len(ended) < most:
            sent, requests = finisher._sort(finisher._next_batch())
            ended += [_sent(attempt) for attempt in sent]
            ended += [_other(attempt, request) for attempt, request in requests.items()]
        return ended

    def put_back(self, ended: Sequence[Ended], after_seconds: float = 0.0) -> None:
        pairs = [cast("tuple[Attempt, AttemptResult]", self._pair(one)) for one in ended]
        if after_seconds:
            asyncio.get_running_loop().call_later(after_seconds, self._return, pairs)
        else:
            self._results.extendleft(reversed(pairs))

    def _return(self, pairs: Sequence[tuple[Attempt, AttemptResult]]) -> None:
        self._results.extend(pairs)
        self._run.kernel.wake()

    def _pair(self, one: Ended) -> tuple[object, object]:
        attempt, request = cast("tuple[Attempt, FinishRequest | None]", one.attempt)
        return attempt, Sent() if request is None else _Requested(request)

    def settle(self, ended: Sequence[Ended], states: Mapping[int, str]) -> None:
        found = {message_id: State(state) for message_id, state in states.items()}
        attempts, requests = [], {}
        for one in ended:
            attempt, request = cast("tuple[Attempt, FinishRequest | None]", one.attempt)
            attempts.append(attempt)
            if request is not None:
                requests[attempt] = request
        self._run.finisher._settle(attempts, found, {}, requests)
        self._run.state.signals.note_written()

    def note_lapsed(self, rows: Sequence[Row]) -> None:
        finisher = self._run.finisher
        lapsed = [LapsedRow._make(row) for row in rows]
        for row in lapsed:
            if row.state == State.PENDING:
                finisher.report_lost(row)
        finisher._report_unattempted([row for row in lapsed if row.state != State.PENDING])

    def take_ended_claims(self) -> list[datetime]:
        ended = list(self._run.state.in_flight.ended_claims)
        self._run.state.in_flight.note_deleted(ended)
        return [claim.claimed_at for claim in ended]


class _Requested:
    """The result of an attempt whose request is made already."""

    def __init__(self, request: FinishRequest) -> None:
        self.request = request


def _sent(attempt: Attempt) -> Ended:
    return Ended((attempt, None), attempt.message.id, attempt.attempt_count, attempt.claim.claimed_at)


def _other(attempt: Attempt, request: FinishRequest) -> Ended:
    return Ended(
        (attempt, request),
        attempt.message.id,
        attempt.attempt_count,
        attempt.claim.claimed_at,
        request.outcome,
        request.reason,
        request.delay_seconds,
        request.reason_code,
        request.breaker_key,
        request.error_place,
        request.fails_after_seconds,
    )


class _Link:
    def __init__(self, run: KernelRun) -> None:
        self._run = run
        self._is_unanswered = False
        self._answered_at: datetime | None = None

    def note_answered(self, rows: Sequence[ClaimedRow]) -> None:
        self._answered_at = next((row.claimed_at for row in rows if row.state == "sending"), None) or self._answered_at

    async def trip(self, steps: Sequence[Step]) -> list[list[Row]]:
        state = self._run.state
        if self._is_unanswered:
            count = await state.store.release_unanswered(state.in_flight, after=self._answered_at)
            self._is_unanswered = False
            if count:
                self._run.kernel.want()
        self._is_unanswered = True
        try:
            results = await state.store.claims.trip(steps)
        except psycopg.Error as error:
            sqlstate = error.sqlstate
            self._is_unanswered = sqlstate is None or sqlstate.startswith(("08", "57P"))
            raise
        self._is_unanswered = False
        state.queues.polled_at = elapsed_clock()
        state.outage.end()
        return results


class _Bell:
    def __init__(self, doorbell: Doorbell, queues: Sequence[str]) -> None:
        self._doorbell = doorbell
        self._queues = queues
        self._backoff = Backoff(0.001, 0.1)

    async def hold(self) -> float | None:
        answer = await self._doorbell.acquire(self._queues)
        if answer is LockAnswer.PRODUCERS:
            return self._backoff.next()
        self._backoff.reset()
        if answer is LockAnswer.ACQUIRED:
            return 0
        seconds = self._doorbell.max_sleep_seconds
        if answer is LockAnswer.NO_LISTENER or not self._doorbell.is_reliable:
            seconds = min(seconds, _POLL_WITHOUT_LISTENER_SECONDS)
        return None if seconds == float("inf") else seconds

    async def release(self) -> None:
        await self._doorbell.release()


class _Loop:
    """The poll loop's public face."""

    def __init__(self, run: KernelRun) -> None:
        self._run = run

    async def run(self) -> None:
        self._run.kernel.claims = True
        self._run.kernel.want()
        await self._run.stopped.wait()
        self._run.kernel.claims = False

    async def deliver_due(self, *, most: int | None = None) -> int:
        engine = self._run.kernel
        engine.room_left = float("inf") if most is None else most
        before = engine.claimed_count
        engine.claims = True
        engine.want()
        waits = [asyncio.ensure_future(one.wait()) for one in (engine.is_quiet, self._run.stopped)]
        waits.append(self._run.engine_task)  # type: ignore[arg-type]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits[:2]:
            one.cancel()
        engine.claims = False
        return engine.claimed_count - before

    async def drain(self) -> None:
        state = self._run.state
        while not state.stopping.is_set():
            await self.deliver_due()
            if not await state.store.count_owed(state.queues.names, state.topics):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._run.pause_seconds()):
                    await self._run.stopped.wait()


class KernelRun(_Run):
    """The parts of one run, around the kernel."""

    def __init__(self, worker: Worker, *, ends_by_itself: bool) -> None:
        super().__init__(worker, ends_by_itself=ends_by_itself)
        state, settings = self.state, self.state.settings
        lanes = fresh_and_retries(state.queues.names)
        by_queue = {name: [lane for lane in lanes if lane.queue == name] for name in state.queues.names}
        self.link = _Link(self)
        self.engine_task: asyncio.Task[None] | None = None
        self._due_seconds: float | None = None
        self._waits_for_ends = True

        def order() -> list[Lane]:
            return [lane for planner in state.queues.in_turn() for lane in by_queue[planner.queue]]

        def next_due(rows: Sequence[Row]) -> float | None:
            due = [DueRow._make(row) for row in rows]
            self._waits_for_ends = any(row.is_limited or row.has_ordered for row in due)
            seconds = [s for row in due for s in (row.first_seconds, row.other_seconds) if s is not None]
            self._due_seconds = min(seconds, default=None)
            return self._due_seconds

        self.kernel = kernel.Run(
            kernel.Options(
                worker=worker.name,
                topics=state.topics,
                hold_topics=self._claimer._hold_topics,
                hooks=state.store._hooks,
                batch_size=settings.batch_size,
                lease_seconds=settings.lease_seconds,
                poll_seconds=settings.poll_interval_seconds,
            ),
            self.link,
            _Attempts(self),
            lanes,
            bell=None if self.doorbell is None else _Bell(self.doorbell, state.queues.names),
            order=order,
            next_due=next_due,
            handle_error=state.outage.pause_or_raise,
        )
        engine, signals, finisher = self.kernel, state.signals, self.finisher
        self.kernel_clock = kernel.time.monotonic
        note_progress = signals.note_progress

        def noted() -> None:
            note_progress()
            engine.wake()

        signals.note_progress = noted  # type: ignore[method-assign]
        signals.note_notification = lambda queue, /, *, is_new=False: engine.want(queue)  # type: ignore[method-assign]
        signals.poll_all_lanes = signals.poll_again = engine.want  # type: ignore[method-assign]
        make = finisher._request_of

        def request_of(attempt: Attempt, result: object) -> FinishRequest:
            if isinstance(result, _Requested):
                return result.request
            return make(attempt, result)  # type: ignore[arg-type]

        finisher._request_of = request_of  # type: ignore[method-assign,assignment]
        def note_written() -> None:
            noted()
            if self._waits_for_ends:
                engine.want()

        signals.note_written = note_written  # type: ignore[method-assign]
        self.stopped = asyncio.Event()  # Of this run: the worker's own event may belong to another event loop.
        stop = state.stop

        def stop_run(error: PgOutboxError | None = None) -> None:
            stop(error)
            self.stopped.set()

        state.stop = stop_run  # type: ignore[method-assign]
        if state.stopping.is_set():
            self.stopped.set()
        self.poll_loop = _Loop(self)  # type: ignore[assignment]

    def pause_seconds(self) -> float:
        """How long a drain waits."""
        due = self._due_seconds
        return _FOREIGN_WORK_SECONDS if due is None else max(0.001, min(due, _FOREIGN_WORK_SECONDS))

    async def _start(self) -> asyncio.Task[None]:
        finishing = await super()._start()
        finishing.cancel()
        self.engine_task = asyncio.create_task(self.kernel.run(), name="pgoutbox-kernel")
        self.engine_task.add_done_callback(lambda task: None if task.cancelled() else self.state.stop())
        return self.engine_task
