"""Circuit breakers: stop sending to a transport or host that is down, and probe it with one message at a time.

This module counts the recent failures of each transport or host, by its key. An open breaker is a row that all workers
share. The row is read after a failure, before a probe when a pause is over, at most once a second while messages are
held back, and at most once a minute when a message arrives that had to wait. It is not read for a send that succeeds at
once, nor while there is nothing to send. The SQL statement decides whether a probe may close or reopen the breaker.
Times come from the database. This module only keeps durations, on a clock that also runs while the machine is
suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import psycopg

from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import BreakerRow, Store
from pgoutbox.message import Message, Outcome, Postponed, ReasonCode, Sent, Transient, Unavailable
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.settings import Settings
from pgoutbox.text import clean_text
from pgoutbox.transports import Content, Transport, breaker_key, part_key, scheme_of
from pgoutbox.transports.registry import MissingTransport, missing_key
from pgoutbox.worker.alert import ALERT_TOPIC
from pgoutbox.worker.dispatcher import Send, send_by

_WINDOW_SECONDS = 60.0
_WINDOW_MIN_COUNT = 20
_MIN_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 10.0
_STALL_SECONDS = 1.0  # A destination that answers nothing for so long counts as stalled.
_STALLED_PAUSE_SECONDS = 5.0
_SHARE = 3  # One destination gets up to three times as many slots as are free.
_LOOK_SECONDS = 60.0
_NEWS_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_MANY = 1_000
_TIMED_OUT = "no answer within the time limit of the handler"

T = TypeVar("T")
HandOver = Callable[[], Awaitable[Outcome]]


class _UnknownError(Exception):
    """The database did not answer."""


@dataclass(slots=True, eq=False)
class _Circuit:
    """The state of one breaker in this process. It is open while `retry_at` is set, and half-open once that has passed.

    The circuit of a part, such as a sender, opens by `Unavailable` alone. Other failures count for the transport, and
    so do slots.
    """

    key: str
    is_part: bool = False
    failure_count: int = 0
    window_began_at: float = 0.0
    window_sent_count: int = 0
    window_failed_count: int = 0
    retry_at: float | None = None
    known_at: float = 0.0
    pause_seconds: float = _MIN_PAUSE_SECONDS
    error: str = ""
    prober: int | None = None
    under_way_count: int = 0
    waiting_count: int = 0
    answered_at: float = 0.0
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def note_success(self) -> None:
        self.failure_count = 0
        self.window_sent_count += 1

    def note_failure(self, settings: Settings) -> bool:
        """Count a failure. Return whether the limit is reached."""
        now = elapsed_clock()
        if now - self.window_began_at > _WINDOW_SECONDS:
            self.window_began_at = now
            self.window_sent_count = self.window_failed_count = 0
        self.failure_count += 1
        self.window_failed_count += 1
        count = self.window_sent_count + self.window_failed_count
        return self.failure_count >= settings.breaker.failures or (
            count >= _WINDOW_MIN_COUNT and self.window_failed_count >= settings.breaker.error_rate * count
        )

    def open(self, row: BreakerRow) -> None:
        """Hold messages back until the row's retry time; only briefly if it has passed and another worker probes."""
        self.pause_seconds = min(max(row.cooldown_seconds / 10, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
        self.error = row.last_error
        self.pause(row.retry_seconds)

    def pause(self, seconds: float = 0.0) -> None:
        self.known_at = elapsed_clock()
        self.retry_at = self.known_at + (seconds if seconds > 0 else self.pause_seconds)

    def close(self) -> None:
        self.retry_at = None
        self.failure_count = 0
        self.window_sent_count = self.window_failed_count = 0

    def snooze(self, failure: Transient | Unavailable | None = None) -> Postponed:
        """Postpone a message until the next probe and a little longer, so that not all messages come back at once.

        If this message itself has a `failure`, postpone it at least until its `retry_after`.
        """
        remaining = 0.0 if self.retry_at is None else self.retry_at - elapsed_clock()
        at_least_seconds = 0.0 if failure is None else failure.retry_after or 0.0
        delay = max(remaining if remaining > 0 else self.pause_seconds, at_least_seconds)
        return Postponed(
            delay + random.uniform(0, self.pause_seconds),
            f"circuit breaker {self.key} is open: {self.error}",
            code=ReasonCode.CIRCUIT_OPEN,
            breaker_key=self.key,
            unknown_error=failure.error if isinstance(failure, Transient) and failure.unknown else None,
        )

    @property
    def is_forgettable(self) -> bool:
        """Whether nothing is in flight and no state has to be kept."""
        return (
            self.retry_at is None
            and not (self.under_way_count or self.waiting_count or self.failure_count)
            and (not self.window_failed_count or elapsed_clock() - self.window_began_at > _WINDOW_SECONDS)
        )


def _failure_of(circuit: _Circuit, outcome: Outcome) -> Transient | Unavailable | None:
    """Return the outcome if it is a failure of this circuit's transport, host or part."""
    match outcome:
        case Unavailable(breaker=key) if key == circuit.key or (key is None and not circuit.is_part):
            return outcome
        case Transient(outage=True) if not circuit.is_part:
            return outcome
        case _:
            return None


class CircuitBreakers:
    """The circuit breakers of one worker.

    With `alert_queue`, the statement that opens or closes a breaker also enqueues an announcement there. Contents that
    may be sent are passed to `hand_over`.
    """

    def __init__(
        self,
        store: Store,
        transports: Mapping[str, Transport],
        settings: Settings,
        telemetry: Telemetry,
        *,
        alert_queue: str | None = None,
        hand_over: Send = send_by,
    ) -> None:
        self._store = store
        self._send_by = hand_over
        self._transports = transports
        self._settings = settings
        self._telemetry = telemetry
        self._alert_queue = alert_queue
        self._circuits: dict[str, _Circuit] = {}
        self._couriers: dict[int, _Circuit] = {}
        self._looked_at: dict[str, float] = {}
        self._asked_for_news_at = float("-inf")
        self._news: asyncio.Task[bool] | None = None
        self._rendering_topics: set[str] = set()
        self._under_way_count = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_stopping = False

    # --- before the handler -------------------------------------------------------------------------------------------

    @property
    def watches_any(self) -> bool:
        """Whether any circuit may refuse a message."""
        return bool(self._circuits)

    @property
    def open_count(self) -> int:
        """The number of breakers that are known to be open. Any thread may read it."""
        return sum(circuit.retry_at is not None for circuit in self._circuits.copy().values())

    async def refusal(self, message: Message[object]) -> Postponed | None:
        """Return a snooze if the breaker refuses this message now, before its handler renders it; else None.

        It refuses only messages of topics whose handler is known to send by a transport. When a probe is due, one
        message passes; the caller reports the end of its attempt with `let_go`.
        """
        refusal = self._refusal(message)
        if refusal is not None and await self._has_news():
            refusal = self._refusal(message)
        return refusal

    def _refusal(self, message: Message[object]) -> Postponed | None:
        if message.destination is None or message.topic not in self._rendering_topics:
            return None
        scheme = scheme_of(message.destination)
        key = breaker_key(self._transports.get(scheme) or MissingTransport(scheme), message, None)
        circuit = None if key is None else self._circuits.get(key)
        if circuit is None:
            return None
        if circuit.retry_at is None:
            return self._stalled(circuit)
        refusal = self._refusal_of_open(circuit, message)
        if refusal is None and message.topic != ALERT_TOPIC:
            circuit.prober = message.id
            self._couriers[message.id] = circuit
        return refusal

    def let_go(self, message: Message[object]) -> None:
        """Report the end of the attempt of a message that was not refused, whether or not it was sent."""
        circuit = self._couriers.pop(message.id, None)
        if circuit is not None and circuit.prober == message.id:
            circuit.prober = None

    def _refusal_of_open(self, circuit: _Circuit, message: Message[object]) -> Postponed | None:
        if circuit.retry_at is not None and elapsed_clock() < circuit.retry_at:
            return circuit.snooze()
        if message.topic != ALERT_TOPIC and circuit.prober not in (None, message.id):
            return circuit.snooze()
        return None

    # --- send ---------------------------------------------------------------------------------------------------------

    async def send(self, transport: Transport, message: Message[object], content: Content) -> Outcome:
        """Call `transport.send`, or snooze the message if a circuit is open. Such an attempt is not used up."""
        self._rendering_topics.add(message.topic)
        hand_over: HandOver = partial(self._send_by, transport, message, content)
        part = part_key(transport, message, content)
        if part is not None:
            hand_over = partial(self._send_through, part, message, hand_over, is_part=True)
        key = breaker_key(transport, message, content)
        outcome = await (hand_over() if key is None else self._send_through(key, message, hand_over))
        if message.attempt_count > 1 and isinstance(outcome, Sent):
            # The message may have waited for a worker that has this transport.
            scheme = content.scheme if message.destination is None else scheme_of(message.destination)
            self._look_for_leftover(missing_key(scheme), None)
        return outcome

    async def _send_through(
        self, key: str, message: Message[object], hand_over: HandOver, *, is_part: bool = False
    ) -> Outcome:
        """Hand the content over, unless the circuit of this key is open."""
        circuit = self._circuits.get(key)
        if circuit is None:
            circuit = self._add(key, is_part=is_part)
        try:
            if circuit.retry_at is None and (refusal := await self._wait_for_room(circuit)) is not None:
                return refusal
            if circuit.retry_at is None:
                return await self._try(circuit, message, hand_over)
            if (refusal := self._refusal_of_open(circuit, message)) is not None:
                if await self._has_news() and circuit.retry_at is None:
                    return await self._try(circuit, message, hand_over)
                return refusal
            if message.topic == ALERT_TOPIC:
                # It may announce this very breaker: it neither counts nor decides.
                return await self._hand_over(circuit, hand_over)
            circuit.prober = message.id
            try:
                return await self._ask_and_probe(circuit, message, hand_over)
            finally:
                circuit.prober = None
        finally:
            if circuit.is_forgettable and self._circuits.get(key) is circuit:
                del self._circuits[key]

    def _add(self, key: str, *, is_part: bool) -> _Circuit:
        if len(self._circuits) >= _MANY:
            long_ago = elapsed_clock() - self._settings.breaker.max_cooldown_seconds - _WINDOW_SECONDS
            for circuit in list(self._circuits.values()):
                if (
                    not (circuit.under_way_count or circuit.waiting_count)
                    and max(circuit.retry_at or 0.0, circuit.answered_at) < long_ago
                ):
                    del self._circuits[circuit.key]
        circuit = self._circuits[key] = _Circuit(key, is_part)
        return circuit

    async def _hand_over(self, circuit: _Circuit, hand_over: HandOver) -> Outcome:
        if not circuit.under_way_count:
            circuit.answered_at = elapsed_clock()
        circuit.under_way_count += 1
        self._under_way_count += not circuit.is_part
        try:
            return await hand_over()
        finally:
            circuit.under_way_count -= 1
            self._under_way_count -= not circuit.is_part
            circuit.answered_at = elapsed_clock()
            circuit.answered.set()

    async def _try(self, circuit: _Circuit, message: Message[object], hand_over: HandOver) -> Outcome:
        counts = message.topic != ALERT_TOPIC
        try:
            outcome = await self._hand_over(circuit, hand_over)
        except asyncio.CancelledError:
            if counts and not circuit.is_part and not self._is_stopping:
                self._start(self._note_failure(circuit, _TIMED_OUT))
            raise
        if isinstance(outcome, Sent):
            circuit.note_success()
            if message.attempt_count > 1:
                self._look_for_leftover(circuit.key, circuit)
        elif counts and (failure := _failure_of(circuit, outcome)) is not None:
            if isinstance(failure, Unavailable):
                await self._learn(circuit, clean_text(failure.error), trips=True)
            else:
                await self._note_failure(circuit, failure.error)
            if circuit.retry_at is not None:
                return circuit.snooze(failure)
        return outcome

    def _note_failure(self, circuit: _Circuit, error: str) -> Coroutine[object, object, None]:
        """Count a failure at once. Return an awaitable that opens the circuit if needed."""
        return self._learn(circuit, clean_text(error), trips=circuit.note_failure(self._settings))

    async def _learn(self, circuit: _Circuit, error: str, *, trips: bool) -> None:
        if circuit.retry_at is not None:
            return
        try:
            row = await self._ask(self._failed(circuit.key, error, trips=trips))
            if row is None and trips:
                row = await self._ask(self._failed(circuit.key, error, trips=trips))
        except _UnknownError:
            return
        if row is None:
            return
        circuit.open(row)

    async def _failed(self, key: str, error: str, *, trips: bool) -> BreakerRow | None:
        row = await self._store.breaker_failed(key, trips=trips, error=error, alert_queue=self._alert_queue)
        if row is not None and row.opened:
            self._telemetry.report(
                logging.WARNING,
                LogEvent.BREAKER_OPENED,
                "breaker opened",
                breaker=key,
                retry_seconds=row.retry_seconds,
            )
        return row

    # --- probe --------------------------------------------------------------------------------------------------------

    async def _ask_and_probe(self, circuit: _Circuit, message: Message[object], hand_over: HandOver) -> Outcome:
        try:
            row = await self._ask(self._store.breaker_probe(circuit.key))
        except _UnknownError:
            circuit.pause()
            return circuit.snooze()
        if row is None:
            circuit.close()  # Another worker's probe has succeeded, or an operator closed it.
            return await self._try(circuit, message, hand_over)
        if row.probe_id is None:
            circuit.open(row)
            return circuit.snooze()
        return await self._probe(circuit, row.probe_id, hand_over)

    async def _probe(self, circuit: _Circuit, probe_id: str, hand_over: HandOver) -> Outcome:
        try:
            outcome = await self._hand_over(circuit, hand_over)
        except asyncio.CancelledError:
            circuit.pause()
            if self._is_stopping:
                self._start(self._release(circuit.key, probe_id))
            else:
                self._start(self._reopen(circuit, probe_id, _TIMED_OUT))
            raise
        except BaseException:
            self._start(self._release(circuit.key, probe_id))
            raise
        if isinstance(outcome, Sent):
            circuit.close()
            self._start(self._close(circuit.key, probe_id))
        elif (failure := _failure_of(circuit, outcome)) is not None:
            await self._reopen(circuit, probe_id, failure.error)
            return circuit.snooze(failure)
        else:
            self._start(self._release(circuit.key, probe_id))
        return outcome

    async def _close(self, key: str, probe_id: str) -> None:
        try:
            open_seconds = await self._ask(self._store.breaker_close(key, probe_id, alert_queue=self._alert_queue))
        except _UnknownError:
            return  # Once its time is over, the probe counts as lost.
        if open_seconds is not None:
            self._telemetry.report(
                logging.INFO, LogEvent.BREAKER_CLOSED, "breaker closed", breaker=key, open_seconds=open_seconds
            )

    async def _reopen(self, circuit: _Circuit, probe_id: str, error: str) -> None:
        circuit.pause()
        try:
            row = await self._ask(self._store.breaker_reopen(circuit.key, probe_id, error=clean_text(error)))
        except _UnknownError:
            return
        if row is not None:
            circuit.open(row)
            self._telemetry.report(
                logging.INFO,
                LogEvent.BREAKER_REOPENED,
                "breaker stays open",
                breaker=circuit.key,
                retry_seconds=row.retry_seconds,
            )

    def _look_for_leftover(self, key: str, circuit: _Circuit | None) -> None:
        """Close the breaker after a send succeeded, in case the worker that opened it is gone.

        If it cannot be probed yet, it opens the `circuit`, if sends check one.
        """
        now = elapsed_clock()
        if now < self._looked_at.get(key, 0.0) + _LOOK_SECONDS:
            return
        if len(self._looked_at) >= _MANY:
            self._looked_at.clear()
        self._looked_at[key] = now
        self._start(self._close_leftover(key, circuit))

    async def _close_leftover(self, key: str, circuit: _Circuit | None) -> None:
        try:
            row = await self._ask(self._store.breaker_probe(key))
        except _UnknownError:
            return
        if row is None:
            return
        if row.probe_id is not None:
            await self._close(key, row.probe_id)
        elif circuit is not None:
            self._circuits.setdefault(key, circuit).open(row)

    async def _has_news(self) -> bool:
        """Read the open breakers again, at most once a second. Return whether one of them is closed.

        Another worker's probe may have succeeded, or an operator has closed it. Concurrent callers share one query.
        """
        if self._news is None:
            asked_at = elapsed_clock()
            paused = [c for c in self._circuits.values() if c.retry_at is not None and c.retry_at > asked_at]
            if not paused or asked_at - self._asked_for_news_at < _NEWS_SECONDS:
                return False
            self._asked_for_news_at = asked_at
            self._news = self._start(self._read_news(paused, asked_at))
        return await asyncio.shield(self._news)

    async def _read_news(self, paused: Sequence[_Circuit], asked_at: float) -> bool:
        try:
            rows = await self._ask(self._store.breakers([circuit.key for circuit in paused]))
        except _UnknownError:
            return False
        finally:
            self._news = None
        has_news = False
        for circuit in paused:
            if circuit.retry_at is None or circuit.known_at > asked_at:
                continue  # The circuit has changed since the query was sent.
            row = rows.get(circuit.key)
            if row is None:
                circuit.close()
                has_news = True
            else:
                circuit.open(row)
        return has_news

    async def _release(self, key: str, probe_id: str) -> None:
        try:
            await self._ask(self._store.breaker_release(key, probe_id))
        except _UnknownError:
            return

    # --- room ---------------------------------------------------------------------------------------------------------

    async def _wait_for_room(self, circuit: _Circuit) -> Postponed | None:
        """Wait until this destination may use one more slot. Return a snooze if it is stalled.

        A stalled destination must not occupy all slots of the process until its timeout. Each destination gets up to
        three times as many slots as are free of sends. A single one gets three quarters, and one slot is always left
        for others.
        """
        while not self._has_room(circuit):
            if (stalled := self._stalled(circuit)) is not None:
                return stalled
            circuit.answered.clear()
            circuit.waiting_count += 1
            try:
                # Without an answer until then, the next turn of the loop finds it stalled.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(circuit.answered_at + _STALL_SECONDS - elapsed_clock()):
                        await circuit.answered.wait()
            finally:
                circuit.waiting_count -= 1
        return None

    def _has_room(self, circuit: _Circuit) -> bool:
        free_count = self._settings.concurrency - self._under_way_count
        return circuit.is_part or circuit.under_way_count < _SHARE * free_count

    def _stalled(self, circuit: _Circuit) -> Postponed | None:
        if self._has_room(circuit) or elapsed_clock() < circuit.answered_at + _STALL_SECONDS:
            return None
        return Postponed(
            _STALLED_PAUSE_SECONDS * random.uniform(1, 1.5),
            f"{circuit.key} answers none of the {circuit.under_way_count} sends in flight",
            code=ReasonCode.STALLED,
            breaker_key=circuit.key,
        )

    # --- database -----------------------------------------------------------------------------------------------------

    async def _ask(self, question: Coroutine[object, object, T]) -> T:
        """Return the database's answer. The cancellation of a send does not break the connection of this query."""
        try:
            return await asyncio.shield(self._start(question))
        except (psycopg.Error, OSError) as error:
            self._telemetry.report(
                logging.WARNING,
                LogEvent.BREAKER_UNKNOWN,
                "the shared circuit breaker could not be read",
                reason=f"{type(error).__name__} {getattr(error, 'sqlstate', None) or ''}".rstrip(),
            )
            raise _UnknownError from error

    def _start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> None:
        """Attribute all cancellations from now on to the end of the worker."""
        self._is_stopping = True

    async def close(self) -> None:
        """Wait briefly until the results of the last probes are written. A lost result costs another probe."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CLOSE_SECONDS
        while self._tasks and (remaining := deadline - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=remaining)
        for task in list(self._tasks):
            task.cancel()
