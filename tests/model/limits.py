"""The model of a limited queue: claims that call `_permits`, count the attempts of a period and those in flight; and
an operator.

A trip takes over a suspect (lapsed.sql), or claims due messages (claim.sql), or does both in one transaction. Each
statement takes a snapshot with a first look at the limits. It then locks the queue's row, unless another claim has it,
and takes a second look with a new snapshot. It then locks the rows of the first snapshot that are unchanged. The lock
of the queue's row lasts until the commit. A lost attempt that is not tried again at once ends without a permit. An
attempt can end in any way: it ends, loses its worker, or its lease expires. An attempt leaves the period in a step.
The promise has its own count of the attempts of the period. The bucket only makes attempts wait longer, so it is not
modelled.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pgoutbox.message import State

PENDING, SENDING = State.PENDING.value, State.SENDING.value
SENT, FAILED = State.SENT.value, State.FAILED.value


class Guard(enum.Enum):
    """Guards of the protocol that a model can leave out."""

    ROW_LOCKED = "_permits locks the queue's row until the claim has ended"
    LIMITS_ASKED_AGAIN = "_permits reads the limits again when it has the row"
    COUNTED_AFTERWARDS = "_permits counts messages in flight under the row lock, not with the claim's snapshot"
    LAPSED_LEFT_OUT = "an attempt whose lease has ended does not count as in flight"
    ASKED_BY_EACH_STATEMENT = "a claim asks for permits of its own, also after a take-over in its transaction"
    COUNTED_IN_THE_ROW = "the attempts are added to the locked row, not to the claim's snapshot"
    COUNTED_WITH_THE_CLAIM = "the attempts are counted by the statement that begins them"


class Row(NamedTuple):
    """A message of the queue."""

    id: int
    state: str = PENDING
    attempt_count: int = 0
    is_lapsed: bool = False
    is_orphan: bool = False


class Limits(NamedTuple):
    """The queue's row. Without a rate or an in-flight limit these are None. `begun_count` is that of the period."""

    rate: int | None
    max_in_flight: int | None
    is_paused: bool = False
    begun_count: int = 0


class Claimer(NamedTuple):
    """A claiming worker: the rows of its snapshot, and how many attempts it may begin. `goes_on`: it takes over a
    suspect, and then may claim."""

    at: str = "idle"
    due: tuple[Row, ...] = ()
    limits: Limits | None = None
    in_flight: int = 0
    permits: int = 0
    goes_on: bool = False


class World(NamedTuple):
    """The complete state. `begun_count` is the true number of attempts that began in the period."""

    rows: tuple[Row, ...]
    claimers: tuple[Claimer, ...]
    limits: Limits
    begun_count: int = 0
    pauses: int = 0
    cuts: int = 0
    fault: str = ""


Step = tuple[str, World]
_IDLE = Claimer()


@dataclass(frozen=True, slots=True)
class Limited:
    """Two claimers and this many messages, in a queue with a `rate` of attempts in a period, or `max_in_flight`, or
    both.

    `pauses` is how often the operator pauses the queue; `cuts` is how often the in-flight limit, or else the rate, is
    reduced by one.
    """

    messages: int = 3
    rate: int | None = None
    max_in_flight: int | None = None
    max_attempts: int = 1
    pauses: int = 0
    cuts: int = 0
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        rows = tuple(Row(number) for number in range(1, self.messages + 1))
        limits = Limits(self.rate, self.max_in_flight)
        return World(rows, (_IDLE, _IDLE), limits, pauses=self.pauses, cuts=self.cuts)

    def canonical(self, state: World) -> World:
        return state if state.claimers[0] <= state.claimers[1] else state._replace(claimers=state.claimers[::-1])

    def fault(self, state: World) -> str:
        return state.fault

    def is_settled(self, state: World) -> bool:
        return all(row.state in (SENT, FAILED) for row in state.rows) and state.claimers == (_IDLE, _IDLE)

    def steps(self, state: World) -> Iterator[Step]:
        for row in state.rows:
            if row.state == SENDING:
                for label, after in (*self._attempt(row), *self._end_lost(row)):
                    yield f"message {row.id} {label}", _with_row(state, after)
        for index, claimer in enumerate(state.claimers):
            for label, following in self._claim(state, index, claimer):
                yield f"worker {index + 1} {label}", following
            if claimer.at != "idle":
                yield f"worker {index + 1} dies", _with(state, index, _IDLE)
        if state.begun_count:
            limits = state.limits._replace(begun_count=max(0, state.limits.begun_count - 1))
            yield "an attempt leaves the period", state._replace(limits=limits, begun_count=state.begun_count - 1)
        if not self._is_row_locked(state):
            yield from self._operate(state)

    def _attempt(self, row: Row) -> Iterator[tuple[str, Row]]:
        if not row.is_orphan:
            yield "is sent", row._replace(state=SENT, is_lapsed=False)
            if row.attempt_count < self.max_attempts:
                yield "is to be tried again", row._replace(state=PENDING, is_lapsed=False)
            yield "loses its worker", row._replace(is_orphan=True)
        if not row.is_lapsed:
            yield "loses its lease", row._replace(is_lapsed=True)

    def _end_lost(self, row: Row) -> Iterator[tuple[str, Row]]:
        """lapsed.sql asks for no permit to end an attempt."""
        if row.is_lapsed and not self._is_suspect(row):
            state = FAILED if row.attempt_count >= self.max_attempts else PENDING
            yield f"is {state}, its attempt is lost", row._replace(state=state, is_lapsed=False, is_orphan=False)

    def _is_suspect(self, row: Row) -> bool:
        """Return whether a lost attempt is tried again at once: only for the first message, so that both ways occur."""
        return row.is_lapsed and row.id == 1 and row.attempt_count < self.max_attempts

    def _operate(self, state: World) -> Iterator[Step]:
        limits = state.limits
        if limits.is_paused:
            yield "the queue is resumed", state._replace(limits=limits._replace(is_paused=False))
        elif state.pauses:
            paused = state._replace(limits=limits._replace(is_paused=True), pauses=state.pauses - 1)
            yield "the queue is paused", paused
        if state.cuts and limits.max_in_flight is not None and limits.max_in_flight > 1:
            cut = limits._replace(max_in_flight=limits.max_in_flight - 1)
            yield "one fewer may be in flight", state._replace(limits=cut, cuts=state.cuts - 1)
        elif state.cuts and limits.rate is not None and limits.rate > 1:
            cut = limits._replace(rate=limits.rate - 1)
            yield "the rate is lowered", state._replace(limits=cut, cuts=state.cuts - 1)

    # --- claim --------------------------------------------------------------------------------------------------------

    def _claim(self, state: World, index: int, claimer: Claimer) -> Iterator[Step]:
        match claimer.at:
            case "idle":
                yield from self._look(state, index)
            case "looked" if self._is_row_locked(state):
                yield "gets no permit, another one has the row", _with(state, index, _IDLE)
            case "looked":
                yield from self._ask(state, index, claimer)
            case "permitted":
                yield from self._begin(state, index, claimer)
            case "goes on":
                yield "commits", _with(state, index, _IDLE)
                yield from self._claim_too(state, index, claimer)
            case "counts":
                counted = state.limits._replace(begun_count=state.limits.begun_count + claimer.permits)
                yield "counts the attempts", _with(state, index, _IDLE)._replace(limits=counted)

    def _is_row_locked(self, state: World) -> bool:
        return Guard.ROW_LOCKED not in self.without and any(
            other.at in ("permitted", "goes on") for other in state.claimers
        )

    def _look(self, state: World, index: int) -> Iterator[Step]:
        in_flight = self._in_flight(state.rows)
        if _permits(state.limits, in_flight) == 0:
            return
        suspects = tuple(row for row in state.rows if row.state == SENDING and self._is_suspect(row))
        for due, goes_on, what in ((suspects, True, "take-over"), (_due(state.rows), False, "claim")):
            if due:
                looked = Claimer("looked", due, state.limits, in_flight, goes_on=goes_on)
                yield f"begins a {what} that sees {_names(due)}", _with(state, index, looked)

    def _claim_too(self, state: World, index: int, claimer: Claimer) -> Iterator[Step]:
        """Claim in the transaction of a take-over, which has the row."""
        due = _due(state.rows)
        count = _permits(state.limits, self._in_flight(state.rows))
        if Guard.ASKED_BY_EACH_STATEMENT in self.without:
            count = claimer.permits
        if due and count:
            permitted = Claimer("permitted", due, claimer.limits, permits=count)
            yield f"gets {count} permits for a claim that sees {_names(due)}", _with(state, index, permitted)

    def _ask(self, state: World, index: int, claimer: Claimer) -> Iterator[Step]:
        limits = state.limits
        if Guard.LIMITS_ASKED_AGAIN in self.without and claimer.limits is not None:
            limits = claimer.limits
        in_flight = self._in_flight(state.rows)
        if Guard.COUNTED_AFTERWARDS in self.without:
            in_flight = claimer.in_flight
        count = _permits(limits, in_flight)
        if count == 0:
            yield "gets no permit", _with(state, index, _IDLE)
        # A claim may have room for more, or not. A take-over takes one suspect at a time.
        for wanted in sorted({1, 1 if claimer.goes_on else count}) if count else ():
            permitted = claimer._replace(at="permitted", in_flight=0, permits=wanted)
            yield f"gets {wanted} permits", _with(state, index, permitted)

    def _in_flight(self, rows: tuple[Row, ...]) -> int:
        counts_lapsed = Guard.LAPSED_LEFT_OUT in self.without
        return sum(row.state == SENDING and (counts_lapsed or not row.is_lapsed) for row in rows)

    def _begin(self, state: World, index: int, claimer: Claimer) -> Iterator[Step]:
        """Lock the rows that have not changed since the snapshot, begin their attempts, and commit."""
        beginning = tuple(row for row in claimer.due if row in state.rows)[: claimer.permits]
        count = len(beginning)
        for row in beginning:
            state = _with_row(state, Row(row.id, SENDING, row.attempt_count + 1))
        limits, begun_count, fault = state.limits, state.begun_count, ""
        after = _IDLE
        if claimer.goes_on:
            after = Claimer("goes on", limits=claimer.limits, permits=claimer.permits)
        if limits.rate is not None:
            begun_count += count
            if count and begun_count > limits.rate:
                fault = "more attempts began in a period than the rate allows"
            if Guard.COUNTED_WITH_THE_CLAIM in self.without:
                after = Claimer("counts", permits=count)
            else:
                held = limits
                if Guard.COUNTED_IN_THE_ROW in self.without and claimer.limits is not None:
                    held = claimer.limits
                limits = limits._replace(begun_count=held.begun_count + count)
        alive = sum(row.state == SENDING and not row.is_lapsed for row in state.rows)
        if count and limits.max_in_flight is not None and alive > limits.max_in_flight:
            fault = "more attempts are in flight than the limit allows"
        if count and limits.is_paused:
            fault = "an attempt begins in a queue that is paused"
        done = _with(state, index, after)._replace(limits=limits, begun_count=begun_count, fault=fault)
        yield f"claims {_names(beginning)}", done


# --- state ------------------------------------------------------------------------------------------------------------


def _permits(limits: Limits, in_flight: int) -> int:
    if limits.is_paused:
        return 0
    counts = [] if limits.rate is None else [limits.rate - limits.begun_count]
    if limits.max_in_flight is not None:
        counts.append(limits.max_in_flight - in_flight)
    return max(0, min(counts))


def _due(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(row for row in rows if row.state == PENDING)


def _names(rows: tuple[Row, ...]) -> str:
    return ", ".join(str(row.id) for row in rows) or "nothing"


def _with(state: World, index: int, claimer: Claimer) -> World:
    claimers = (claimer, state.claimers[1]) if index == 0 else (state.claimers[0], claimer)
    return state._replace(claimers=claimers)


def _with_row(state: World, row: Row) -> World:
    return state._replace(rows=tuple(row if old.id == row.id else old for old in state.rows))
