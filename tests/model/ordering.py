"""The model of ordering keys: enqueues for one key, claims, halting failures, and pruning.

A claim judges a key by its snapshot, and then reads the locked row and the index again. Anything can happen between
these two steps. Rows are kept in the order of commits and of the items of a bulk, to which the promise refers; the
statements know only ids. Fences and leases belong to the model of delivery: here a finish is one step, and so is the
take-over of a lapsed attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pgoutbox.message import State

PENDING, SENDING, SENT = State.PENDING.value, State.SENDING.value, State.SENT.value
FAILED, CANCELLED, PRUNED = State.FAILED.value, State.CANCELLED.value, "pruned"
_AVOIDABLE_FAILURE = "a whole claim fails because of a message that it could have skipped"
_LIVE = (PENDING, SENDING)


class Guard(enum.Enum):
    """Guards of the protocol that a model can leave out."""

    ID_UNDER_TAIL_LOCK = "enqueue draws the id while it has the key's row"
    ITEMS_IN_ORDER = "a bulk enqueue draws the ids of a key in the order of its items"
    TAIL_UNCHANGED = "a key is forgotten only as the snapshot of the prune saw it"
    TAIL_UNNEEDED = "a key with a live, failed or cancelled message is not forgotten"
    FIRST_IN_CLAIM = "claim.sql takes only the first message of an ordering key"
    SIBLINGS_IN_CLAIM = "it passes over an ordering key that is in flight"
    HALT_IN_CLAIM = "it passes over an ordering key that is halted"
    IN_FLIGHT_INDEX = "the unique index message_live_ordered_in_flight"
    LAPSED_HAVE_KEYS = "lost attempts end whether or not they have an ordering key"


class Row(NamedTuple):
    """A committed message. Only the model knows the last two fields: after `has_passed`, nothing waits for the
    message again."""

    id: int
    state: str = PENDING
    attempt_count: int = 0
    max_attempts: int = 1
    is_lapsed: bool = False
    has_passed: bool = False


class Worker(NamedTuple):
    """A worker: the message that it claims or holds."""

    at: str = "idle"
    id: int = 0
    attempt_count: int = 0
    outcome: str = ""
    has_handed_over: bool = False


class Producer(NamedTuple):
    """A producer: the number of transactions left, and the last id in the open one."""

    left: int
    at: str = "idle"
    id: int = 0


class World(NamedTuple):
    """The complete state. `tail`: the key has a row. `prune`: the current step of a prune of keys."""

    rows: tuple[Row, ...]
    producers: tuple[Producer, ...]
    workers: tuple[Worker, ...]
    tail: bool = True
    prune: str = ""
    redrives: int = 0
    cancels: int = 0
    prunes: int = 0
    fault: str = ""


Step = tuple[str, World]
_IDLE = Worker()


@dataclass(frozen=True, slots=True)
class Ordering:
    """The model of two workers and one ordering key, for which each producer commits this many messages, or bulks of
    messages.

    `halts`: later messages wait after a failure; otherwise they continue. `forgets` lets a prune delete the key's
    row while it is unneeded. Without producers, `messages` exist from the beginning.
    """

    producers: tuple[int, ...] = ()
    messages: int = 0
    bulk: int = 1
    halts: bool = False
    max_attempts: int = 1
    redrives: int = 0
    cancels: int = 0
    prunes: int = 0
    forgets: bool = False
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        return World(
            tuple(Row(number, max_attempts=self.max_attempts) for number in range(1, self.messages + 1)),
            tuple(Producer(left) for left in self.producers),
            (_IDLE, _IDLE),
            prune="may look" if self.forgets else "",
            redrives=self.redrives,
            cancels=self.cancels,
            prunes=self.prunes,
        )

    def canonical(self, state: World) -> World:
        one, other = state.workers
        if other < one:
            state = state._replace(workers=(other, one))
        if len(state.producers) > 1 and state.producers[1] < state.producers[0]:
            state = state._replace(producers=state.producers[::-1])
        return state

    def fault(self, state: World) -> str:
        if state.fault:
            return state.fault
        if sum(row.state == SENDING for row in state.rows) > 1:
            return "two messages of one ordering key are in flight"
        return ""

    def is_settled(self, state: World) -> bool:
        """Pending messages behind a halting failure wait for an operator."""
        return (
            state.workers == (_IDLE, _IDLE)
            and all(producer.at == "idle" and not producer.left for producer in state.producers)
            and all(
                row.state != SENDING and (row.state != PENDING or self._is_halted(state, row)) for row in state.rows
            )
        )

    def steps(self, state: World) -> Iterator[Step]:
        for row in state.rows:
            if row.state == SENDING and not row.is_lapsed:
                yield f"the lease of message {row.id} runs out", _with_row(state, row._replace(is_lapsed=True))
        for index, producer in enumerate(state.producers):
            for label, following in self._enqueue(state, index, producer):
                yield f"producer {index + 1} {label}", following
        for index, worker in enumerate(state.workers):
            for label, following in self._work(state, index, worker):
                yield f"worker {index + 1} {label}", following
            if worker.at != "idle":
                yield f"worker {index + 1} dies", _with(state, index, _IDLE)
        yield from self._operate(state)
        yield from self._forget(state)

    # --- enqueue ------------------------------------------------------------------------------------------------------

    def _enqueue(self, state: World, index: int, producer: Producer) -> Iterator[Step]:
        match producer.at:
            case "idle" if producer.left:
                drawn = producer._replace(at="drawn", id=_next_id(state) + self.bulk - 1)
                yield f"begins and draws id {drawn.id}", _with_producer(state, index, drawn)
            case "drawn" if not any(other.at == "locked" for other in state.producers):
                # An existing row is updated, with an id that is drawn then; a missing row is inserted.
                draws_again = state.tail and Guard.ID_UNDER_TAIL_LOCK not in self.without
                new_id = _next_id(state) + self.bulk - 1 if draws_again else producer.id
                locked = producer._replace(at="locked", id=new_id)
                yield f"has the key's row and inserts message {new_id}", _with_producer(state, index, locked)
            case "locked":
                done = Producer(producer.left - 1)
                yield "rolls back", _with_producer(state, index, done)
                ids = range(producer.id - self.bulk + 1, producer.id + 1)
                items = reversed(ids) if Guard.ITEMS_IN_ORDER in self.without else ids
                rows = (*state.rows, *(Row(item, max_attempts=self.max_attempts) for item in items))
                prune = "sees another" if state.prune == "has seen it" else state.prune
                committed = _with_producer(state, index, done)._replace(rows=rows, tail=True, prune=prune)
                yield f"commits message {producer.id}", committed

    def _forget(self, state: World) -> Iterator[Step]:
        """PRUNE_KEYS: the key was unneeded in its snapshot."""
        is_unneeded = all(row.state in (SENT, PRUNED) for row in state.rows)
        if state.prune == "may look" and state.tail and (is_unneeded or Guard.TAIL_UNNEEDED in self.without):
            yield "a prune sees that no message needs the key", state._replace(prune="has seen it")
        elif state.prune in ("has seen it", "sees another"):
            if any(producer.at == "locked" for producer in state.producers):
                yield "the prune passes over the key's row, which is locked", state._replace(prune="")
            elif state.prune == "sees another" and Guard.TAIL_UNCHANGED not in self.without:
                yield "the prune leaves the key's row, which is another one by now", state._replace(prune="")
            else:
                yield "the prune deletes the key's row", state._replace(prune="", tail=False)

    # --- worker -------------------------------------------------------------------------------------------------------

    def _work(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        match worker.at:
            case "idle":
                yield from self._claim(state, index)
                yield from self._take_lapsed(state, index)
            case "claiming":
                yield from self._commit_claim(state, index, worker)
            case "holds":
                yield from self._attempt(state, index, worker)
            case _:
                yield from self._finish(state, index, worker)

    def _claim(self, state: World, index: int) -> Iterator[Step]:
        """Take the snapshot of a claim. Beginning a message that the snapshot excludes is a fault of its own."""
        live = sorted(row for row in state.rows if row.state in _LIVE)
        has_sibling = any(row.state == SENDING for row in live)
        for row in live if Guard.FIRST_IN_CLAIM in self.without else live[:1]:
            is_halted = self._is_halted(state, row)
            if (
                row.state != PENDING
                or (has_sibling and Guard.SIBLINGS_IN_CLAIM not in self.without)
                or (is_halted and Guard.HALT_IN_CLAIM not in self.without)
            ):
                continue
            outcome = ""
            if has_sibling:
                outcome = _AVOIDABLE_FAILURE
            elif is_halted:
                outcome = "a claim begins a message that is halted in its snapshot"
            elif row is not live[0]:
                outcome = "a claim begins a message that is not the first of its key in its snapshot"
            yield (
                f"begins a claim that sees message {row.id}",
                _with(state, index, Worker("claiming", row.id, 0, outcome)),
            )

    def _commit_claim(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        row = _row_of(state, worker.id)
        if row.state != PENDING:
            yield "has lost it to somebody else", _with(state, index, _IDLE)
            return
        if Guard.IN_FLIGHT_INDEX not in self.without and any(other.state == SENDING for other in state.rows):
            refused = _with(state, index, _IDLE)
            fault = worker.outcome if worker.outcome == _AVOIDABLE_FAILURE else ""
            yield "is refused by the index: its claim is rolled back", refused._replace(fault=fault)
            return
        begun = self._begin(row)
        after = Worker("holds", row.id, begun.attempt_count) if begun.state == SENDING else _IDLE
        claimed = _with(_with_row(state, begun), index, after)
        yield f"claims message {row.id}: {begun.state}", claimed._replace(fault=worker.outcome)

    def _take_lapsed(self, state: World, index: int) -> Iterator[Step]:
        if Guard.LAPSED_HAVE_KEYS in self.without:
            return
        for row in state.rows:
            if row.state == SENDING and row.is_lapsed:
                begun = self._begin(row)
                after = Worker("holds", row.id, begun.attempt_count) if begun.state == SENDING else _IDLE
                yield f"takes over message {row.id}: {begun.state}", _with(_with_row(state, begun), index, after)

    def _begin(self, row: Row) -> Row:
        if row.attempt_count >= row.max_attempts:
            return self._ended(row, FAILED)
        return row._replace(state=SENDING, attempt_count=row.attempt_count + 1, is_lapsed=False)

    def _ended(self, row: Row, final: str) -> Row:
        passes = final != FAILED or not self.halts
        return row._replace(state=final, is_lapsed=False, has_passed=row.has_passed or passes)

    def _attempt(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        row = _row_of(state, worker.id)
        is_held = row.state == SENDING and row.attempt_count == worker.attempt_count
        earlier = state.rows[: state.rows.index(row)]
        fault = ""
        if is_held and not all(other.has_passed for other in earlier):
            fault = "a message was handed over before one that was committed earlier"
        handed = worker._replace(at="ended", outcome=SENT, has_handed_over=True)
        yield f"HANDS OVER message {row.id}", _with(state, index, handed)._replace(fault=fault)
        yield "fails", _with(state, index, worker._replace(at="ended", outcome="retry"))

    def _finish(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        row = _row_of(state, worker.id)
        if row.state != SENDING or row.attempt_count != worker.attempt_count:
            yield "finds its lease lost", _with(state, index, _IDLE)
            return
        if worker.outcome == SENT:
            after = self._ended(row, SENT)
        elif row.attempt_count >= row.max_attempts:
            after = self._ended(row, FAILED)
        else:
            after = row._replace(state=PENDING, is_lapsed=False)
        yield f"finishes message {row.id}: {after.state}", _with(_with_row(state, after), index, _IDLE)

    # --- operator -----------------------------------------------------------------------------------------------------

    def _operate(self, state: World) -> Iterator[Step]:
        for row in state.rows:
            if state.redrives and row.state in (FAILED, CANCELLED):
                back = row._replace(state=PENDING, max_attempts=row.attempt_count + self.max_attempts)
                yield f"message {row.id} is redriven", _with_row(state, back)._replace(redrives=state.redrives - 1)
            if state.cancels and row.state == PENDING:
                gone = self._ended(row, CANCELLED)
                yield f"message {row.id} is cancelled", _with_row(state, gone)._replace(cancels=state.cancels - 1)
            if state.prunes and row.state == FAILED:
                pruned = self._ended(row, PRUNED)
                yield f"message {row.id} is pruned", _with_row(state, pruned)._replace(prunes=state.prunes - 1)

    def _is_halted(self, state: World, row: Row) -> bool:
        return self.halts and any(other.state == FAILED and other.id < row.id for other in state.rows)


# --- state ------------------------------------------------------------------------------------------------------------


def _next_id(state: World) -> int:
    """Return the next number of the sequence. Unreferenced numbers are reused, which reduces the number of states."""
    return max([0, *(row.id for row in state.rows), *(producer.id for producer in state.producers)]) + 1


def _row_of(state: World, message_id: int) -> Row:
    return next(row for row in state.rows if row.id == message_id)


def _with(state: World, index: int, worker: Worker) -> World:
    workers = (worker, state.workers[1]) if index == 0 else (state.workers[0], worker)
    return state._replace(workers=workers)


def _with_producer(state: World, index: int, producer: Producer) -> World:
    return state._replace(producers=(*state.producers[:index], producer, *state.producers[index + 1 :]))


def _with_row(state: World, row: Row) -> World:
    return state._replace(rows=tuple(row if old.id == row.id else old for old in state.rows))
