"""The circuit breakers of one worker: stop sending to a transport or host that is down, and probe it with one message.

Each send passes the breaker of its transport or host, and those of its parts if it has any, such as a sender. The
bulkhead limits the slots of a destination. Breakers that are open are shared with all workers, through the database.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from pgoutbox.clock import elapsed_clock
from pgoutbox.message import Message, Outcome, Postponed, ReasonCode, SendFailure, Sent, Unavailable
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.transports import Content, Transport, bare_destination, breaker_key, part_keys, scheme_of
from pgoutbox.transports.registry import MissingTransport, missing_key
from pgoutbox.worker.breakers.bulkhead import Bulkhead, Room
from pgoutbox.worker.breakers.circuit_breaker import WINDOW_SECONDS, CircuitBreaker
from pgoutbox.worker.breakers.shared_breakers import SharedBreakers
from pgoutbox.worker.dispatcher import Send, send_by
from pgoutbox.worker.run_state import RunState

_STALLED_PAUSE_SECONDS = 5.0
_MAX_CIRCUITS = 1_000
_TIMED_OUT = SendFailure("no answer within the time limit of the handler", outage=True)

_Call = Callable[[], Awaitable[Outcome]]


class _Circuit(NamedTuple):
    breaker: CircuitBreaker
    room: Room


class Grant(NamedTuple):
    """The database lets a message probe this breaker. `hold` is that of a message that a claim took for it."""

    breaker_key: str
    probe_id: str
    hold: str | None = None


class CircuitBreakers:
    """The circuit breakers of one worker."""

    def __init__(
        self, run: RunState, transports: Mapping[str, Transport], *, clock: Callable[[], float] = elapsed_clock
    ) -> None:
        self._transports = transports
        self._settings = settings = run.settings
        self._clock = clock
        self._shared = SharedBreakers(run, clock=clock)
        self._bulkhead = Bulkhead(settings.concurrency, clock)
        self._no_bulkhead = Bulkhead(math.inf, clock)  # The send of a part has its slot in its transport's bulkhead.
        self._circuits: dict[str, _Circuit] = {}
        self.grants: dict[int, Grant | None] = {}
        """The grants of probes by message, until its attempt ends. None: it is used."""
        self._rendering_topics: set[str] = set()
        self._is_stopping = False
        self._inherited: dict[str, dict[str, Any]] | None = None
        self._used_keys: set[str] = set()

    async def inherit(self) -> None:
        """Continue to count the failures in a row of the last run. The next run continues with `memory`.

        Otherwise no breaker would open if each run sends fewer messages than it takes.
        """
        self._inherited = await self._shared.failures_of_last_run()

    @property
    def watches_any(self) -> bool:
        """Whether any circuit may refuse a message."""
        return bool(self._circuits)

    def note_claim(self) -> None:
        """Believe a claim rather than what this process remembers: it left out the messages behind open breakers."""
        self._shared.note_claim()

    def grant(self, message_id: int, grant: Grant) -> None:
        """Let a claimed message probe its breaker. Report the end of its attempt with `end_grant`."""
        self.grants[message_id] = grant

    def end_grant(self, message_id: int, *, is_sent: bool) -> None:
        """Report the end of any attempt. A probe that it has not used is given back."""
        if (grant := self.grants.pop(message_id, None)) is not None:
            self._give_back(grant, is_freed=is_sent)

    def _give_back(self, grant: Grant, *, is_freed: bool) -> None:
        if (circuit := self._circuits.get(grant.breaker_key)) is not None:
            circuit.breaker.is_probing = False
        freed_hold = grant.hold if is_freed else None
        self._shared.release(grant.breaker_key, grant.probe_id, freed_hold)

    @property
    def open_count(self) -> int:
        """The number of breakers that are known to be open. Any thread may read it."""
        return sum(not circuit.breaker.is_closed for circuit in self._circuits.copy().values())

    def may_refuse(self, message: Message[object]) -> bool:
        """Whether to ask for the `refusal` of this message: its breaker is not closed, or its destination is stalled.

        The circuit is known before the handler runs for topics whose handler is known to send by a transport.
        """
        circuit = self._circuit_of(message)
        return circuit is not None and (not circuit.breaker.is_closed or circuit.room.is_stalled)

    def _circuit_of(self, message: Message[object]) -> _Circuit | None:
        if message.destination is None or message.topic not in self._rendering_topics or message.id in self.grants:
            return None
        scheme = scheme_of(message.destination)
        key = breaker_key(self._transports.get(scheme) or MissingTransport(scheme), message, None)
        return None if key is None else self._circuits.get(key)

    async def refusal(self, message: Message[object]) -> Postponed | None:
        """Return a snooze if the breaker refuses this message now, before its handler renders it; else None.

        When a probe is due, one message gets it.
        """
        circuit = self._circuit_of(message)
        if circuit is None:
            return None
        if circuit.breaker.is_closed:
            return _stalled(circuit) if await circuit.room.proves_stalled() else None
        answer = await self._ask(circuit, message)
        if isinstance(answer, Grant):
            self.grants[message.id] = answer
            return None
        return answer

    async def _ask(self, circuit: _Circuit, message: Message[object]) -> Postponed | Grant | None:
        """Ask an open breaker for a probe. None: the message need not probe, because it is an alert or it has closed.

        An alert may announce this very breaker: it neither counts nor probes, and waits only during the pause.
        """
        breaker, is_alert = circuit.breaker, message.topic == ALERT_TOPIC
        recipient = _recipient_of(message)

        def must_wait() -> bool:
            return breaker.is_paused(self._clock()) if is_alert else breaker.holds(self._clock(), recipient)

        if must_wait():
            breakers = [one.breaker for one in self._circuits.values()]
            # If it were still open, the claim would have left out this message.
            await self._shared.refresh(breakers, is_doubted=self._holds_alike(breaker, message))
            # The refresh may have closed the breaker or changed its pause, and the pause may be over.
            if must_wait():
                return self._postpone(breaker, message)
        if breaker.is_closed or is_alert:
            return None
        breaker.is_probing = True
        probe_id = None
        try:
            probe_id = await self._shared.begin_probe(breaker)
        finally:
            breaker.is_probing = probe_id is not None
        if probe_id is not None:
            return Grant(breaker.key, probe_id)
        # The answer has closed or paused the breaker.
        return None if breaker.retry_at is None else self._postpone(breaker, message)

    async def send(
        self, transport: Transport, message: Message[object], content: Content, *, by: Send = send_by
    ) -> Outcome:
        """Send `by` the transport, or snooze the message if a breaker is open. Such an attempt is not used up."""
        self._rendering_topics.add(message.topic)
        key, parts = breaker_key(transport, message, content), part_keys(transport, message, content)
        call: _Call = partial(by, transport, message, content)
        watched = [part for part in parts if part in self._circuits or part in (self._inherited or ())]
        for part in watched:
            call = partial(self._send_through, part, message, call, is_part=True)
        began_at = self._clock()
        outcome = await (call() if key is None else self._send_through(key, message, call))
        if isinstance(outcome, Sent):
            if message.topic != ALERT_TOPIC:
                # The message may have waited for a worker that has this transport.
                scheme = content.scheme if message.destination is None else scheme_of(message.destination)
                self._shared.note_success((missing_key(scheme), *parts, key), began_at=began_at)
            return outcome
        # The first failure of a part begins its circuit. Without one it is closed.
        fault = outcome.breaker if isinstance(outcome, (SendFailure, Unavailable)) else None
        if fault is None or fault in watched or fault not in parts:
            return outcome
        return await self._record(self._circuits.get(fault) or self._add(fault, is_part=True), message, outcome)

    async def _send_through(self, key: str, message: Message[object], call: _Call, *, is_part: bool = False) -> Outcome:
        circuit = self._circuits.get(key) or self._add(key, is_part=is_part)
        room = circuit.room
        try:
            if not is_part and self.grants and (grant := self.grants.get(message.id)) is not None:
                self.grants[message.id] = None
                if grant.breaker_key == key:
                    return await self._probe(circuit, grant.probe_id, message, call)
                self._give_back(grant, is_freed=True)
            # Other sends may open the breaker, or take the room: ask again after each wait.
            while not circuit.breaker.is_closed or room.is_full:
                if not circuit.breaker.is_closed:
                    answer = await self._ask(circuit, message)
                    if isinstance(answer, Grant):
                        return await self._probe(circuit, answer.probe_id, message, call)
                    if answer is not None:
                        return answer
                    if message.topic == ALERT_TOPIC:
                        break
                elif await room.proves_stalled():
                    return _stalled(circuit)
                else:
                    await room.wait()
            return await self._send_and_record(circuit, message, call)
        finally:
            # Another circuit may have taken its place in the table during the send.
            is_in_use = room.is_in_use or not circuit.breaker.is_forgettable(self._clock())
            if not is_in_use and self._circuits.get(key) is circuit:
                del self._circuits[key]

    def _add(self, key: str, *, is_part: bool) -> _Circuit:
        if len(self._circuits) >= _MAX_CIRCUITS:
            long_ago = self._clock() - self._settings.breaker.max_cooldown_seconds - WINDOW_SECONDS
            for circuit in list(self._circuits.values()):
                last_at = max(circuit.breaker.retry_at or 0.0, circuit.room.answered_at)
                if last_at < long_ago and not circuit.room.is_in_use:
                    del self._circuits[circuit.breaker.key]
        limits = self._settings.breaker.failures, self._settings.breaker.error_rate
        room = Room(self._no_bulkhead if is_part else self._bulkhead)
        breaker = CircuitBreaker(key, *limits, is_part=is_part)
        if self._inherited is not None:
            breaker.remember(**self._inherited.pop(key, {}))
            self._used_keys.add(key)
        circuit = self._circuits[key] = _Circuit(breaker, room)
        return circuit

    async def _send_and_record(self, circuit: _Circuit, message: Message[object], call: _Call) -> Outcome:
        breaker = circuit.breaker
        counts = message.topic != ALERT_TOPIC
        try:
            outcome = await circuit.room.use(call)
        except asyncio.CancelledError:
            if counts and not breaker.is_part and not self._is_stopping:
                trips = breaker.record_failure(_TIMED_OUT, self._clock())
                record = self._shared.start(self._shared.record_failure(breaker, _TIMED_OUT.error, trips=trips))
                if trips:  # Until the breaker is known to be open, the next attempt of this message would be sent.
                    await asyncio.shield(record)
            raise
        if isinstance(outcome, Sent) and counts:
            breaker.record_success(_recipient_of(message))
            return outcome
        return await self._record(circuit, message, outcome)

    async def _record(self, circuit: _Circuit, message: Message[object], outcome: Outcome) -> Outcome:
        """Record an outcome other than a success. Other sends may have opened the breaker during this one."""
        breaker = circuit.breaker
        counts = message.topic != ALERT_TOPIC
        if (failure := breaker.failure_of(outcome)) is not None:
            trips = counts and breaker.record_failure(failure, self._clock())
            # A cancellation of the send must not lose the answer: only one answer says that the breaker has opened.
            record = self._shared.record_failure(breaker, failure.error, trips=trips)
            await asyncio.shield(self._shared.start(record))
            # A probe of another message may have closed it again.
            if not breaker.is_closed:
                # No probe may come while the breaker is half-open. So the pauses of an alert grow.
                if not counts:
                    return Unavailable(failure.error, failure.retry_after)
                return self._postpone(breaker, message, failure)
        return breaker.own_failure(outcome)

    async def _probe(self, circuit: _Circuit, probe_id: str, message: Message[object], call: _Call) -> Outcome:
        breaker, shared = circuit.breaker, self._shared
        breaker.is_probing = True
        try:
            outcome = await circuit.room.use(call)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                breaker.pause(self._clock())
            if isinstance(error, asyncio.CancelledError) and not self._is_stopping:
                shared.start(shared.reopen(breaker, probe_id, _TIMED_OUT.error))
            else:
                shared.release(breaker.key, probe_id)
            raise
        finally:
            breaker.is_probing = False
        # The breaker may have changed by a refresh. The result of the probe is newer.
        if isinstance(outcome, Sent):
            breaker.record_success(_recipient_of(message))
            breaker.close()
            shared.start(shared.close(breaker.key, probe_id))
        elif (failure := breaker.failure_of(outcome)) is not None:
            breaker.record_failure(failure, self._clock())
            await shared.reopen(breaker, probe_id, failure.error)
            return self._postpone(breaker, message, failure)
        else:
            shared.release(breaker.key, probe_id)
        return breaker.own_failure(outcome)

    def _postpone(
        self, breaker: CircuitBreaker, message: Message[object], failure: SendFailure | Unavailable | None = None
    ) -> Postponed:
        """Postpone a message until the next probe and a little longer, so that not all messages come back at once.

        If this message itself has a `failure`, postpone it at least until its `retry_after`.
        """
        # The failure may name another recipient than the message, which must not probe again at once.
        wait_seconds = breaker.wait_seconds(self._clock(), _recipient_of(message) if failure is None else None)
        at_least_seconds = 0.0 if failure is None else failure.retry_after or 0.0
        return Postponed(
            max(wait_seconds, at_least_seconds) + random.uniform(0, breaker.pause_seconds),
            f"circuit breaker {breaker.key} is open: {breaker.error}",
            code=ReasonCode.CIRCUIT_OPEN,
            breaker_key=breaker.key,
            unknown_error=failure.error if isinstance(failure, SendFailure) and failure.unknown else None,
            held_delay=at_least_seconds if self._holds_alike(breaker, message) else None,
        )

    def _holds_alike(self, breaker: CircuitBreaker, message: Message[object]) -> bool:
        """Whether the breaker holds back all messages of this topic with the scheme or web host of this destination."""
        bare = None if message.destination is None else bare_destination(message.destination)
        transport = None if bare is None else self._transports.get(scheme_of(bare))
        if bare is None or transport is None or message.topic == ALERT_TOPIC or breaker.is_in_doubt:
            return False  # Other workers may have a transport that this one lacks.
        try:
            return breaker_key(transport, replace(message, destination=bare), None) == breaker.key
        except Exception:  # noqa: BLE001 - an application's transport may not know a part of a destination
            return False

    async def settle(self) -> None:
        """Wait briefly until the results of all probes are written."""
        await self._shared.settle()

    def stop(self) -> None:
        """Attribute all cancellations from now on to the end of the worker."""
        self._is_stopping = True

    async def close(self) -> None:
        """Wait briefly until the results of the last probes are written."""
        await self._shared.aclose()

    @property
    def memory(self) -> dict[str, dict[str, Any]]:
        """The failures in a row of each breaker that this run has used."""
        circuits = self._circuits
        return {key: circuits[key].breaker.memory() if key in circuits else {} for key in self._used_keys}


def _recipient_of(message: Message[object]) -> str:
    return message.destination or str(message.id)


def _stalled(circuit: _Circuit) -> Postponed:
    return Postponed(
        _STALLED_PAUSE_SECONDS * random.uniform(1, 1.5),
        f"{circuit.breaker.key} answers none of the {circuit.room.in_flight_count} sends in flight",
        code=ReasonCode.STALLED,
        breaker_key=circuit.breaker.key,
    )
