"""The model of deletion: a rule that keeps no sent messages, prunes, and the contents that messages share.

There is one message that names a content, two workers, and an operator who sets and unsets the rule, redrives and
resends; also prunes of messages and of contents. A statement takes a snapshot and, in a later step, locks rows and
reads them again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pgoutbox.message import State

PENDING, SENDING = State.PENDING.value, State.SENDING.value
SENT, FAILED = State.SENT.value, State.FAILED.value
_FINAL = (SENT, FAILED)


class Guard(enum.Enum):
    """Guards of the protocol that a model can leave out."""

    TOKEN_IN_FORGET = "the attempt count in FORGET_SENT"
    STATE_IN_FORGET = "the state in FORGET_SENT"
    RULE_IN_FORGET = "FORGET_SENT asks for the rule itself"
    STATE_IN_PRUNE = "a prune looks at the row again when it has the lock"
    SOURCE_LOCKED = "a resend locks the message that it copies"
    CONTENT_IS_NAMED = "PRUNE_CONTENT keeps contents that a message names"


class Row(NamedTuple):
    """The message, or its copy. Only the model knows the last two fields."""

    state: str = PENDING
    attempt_count: int = 0
    is_lapsed: bool = False
    handed_over: bool = False


class Worker(NamedTuple):
    """A worker: the attempt that it believes to hold, and the rules that it knows."""

    at: str = "idle"
    attempt_count: int = 0
    forgets: bool = False


class World(NamedTuple):
    """The complete state. `row` and `content` are None after deletion; `copy` is the result of a resend."""

    row: Row | None
    workers: tuple[Worker, ...]
    content: bool = True
    copy: bool = False
    has_rule: bool = False
    changes: int = 0
    redrives: int = 0
    resend: str = ""
    prune: str = ""
    prune_of_contents: str = ""
    fault: str = ""


Step = tuple[str, World]
_IDLE = Worker()


@dataclass(frozen=True, slots=True)
class Retention:
    """`changes` is how often the rule, which deletes the message as it is sent, is set or unset."""

    changes: int = 1
    has_rule: bool = False
    redrives: int = 0
    resends: bool = False
    max_attempts: int = 2
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        return World(
            Row(),
            (_IDLE, _IDLE),
            has_rule=self.has_rule,
            changes=self.changes,
            redrives=self.redrives,
            resend="may" if self.resends else "",
        )

    def canonical(self, state: World) -> World:
        return state if state.workers[0] <= state.workers[1] else state._replace(workers=state.workers[::-1])

    def fault(self, state: World) -> str:
        if state.fault:
            return state.fault
        names = state.copy or state.row is not None
        return "a message names a content that is deleted" if names and not state.content else ""

    def is_settled(self, state: World) -> bool:
        return (
            (state.row is None or state.row.state in _FINAL)
            and (state.row is not None or state.copy or not state.content)
            and state.workers == (_IDLE, _IDLE)
        )

    def steps(self, state: World) -> Iterator[Step]:
        if state.row is not None and state.row.state == SENDING and not state.row.is_lapsed:
            yield "its lease runs out", state._replace(row=state.row._replace(is_lapsed=True))
        for index, worker in enumerate(state.workers):
            for label, following in self._work(state, index, worker):
                yield f"worker {index + 1} {label}", following
            if worker.at != "idle":
                yield f"worker {index + 1} dies", _with(state, index, _IDLE)
        yield from self._operate(state)
        yield from self._prune(state)
        yield from self._prune_contents(state)
        yield from self._resend(state)

    # --- worker -------------------------------------------------------------------------------------------------------

    def _work(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        row = state.row
        match worker.at:
            case "idle" if row is not None and (row.state == PENDING or (row.state == SENDING and row.is_lapsed)):
                yield from self._claim(state, index, row)
            case "holds":
                handed = state if row is None else state._replace(row=row._replace(handed_over=True))
                yield "HANDS OVER", _with(handed, index, worker._replace(at="sent"))
                yield "fails", _with(state, index, worker._replace(at="failed"))
            case "sent":
                now = worker._replace(at="finishing", forgets=state.has_rule)
                yield "begins to finish", _with(state, index, now)
            case "finishing":
                yield from self._finish(state, index, worker)
            case "failed":
                yield from self._fail(state, index, worker)

    def _claim(self, state: World, index: int, row: Row) -> Iterator[Step]:
        if row.attempt_count >= self.max_attempts + (self.redrives - state.redrives):
            yield "finds no attempt left", state._replace(row=row._replace(state=FAILED, is_lapsed=False))
            return
        begun = Row(SENDING, row.attempt_count + 1, handed_over=row.handed_over)
        holds = Worker("holds", begun.attempt_count)
        yield f"claims attempt {begun.attempt_count}", _with(state._replace(row=begun), index, holds)

    def _finish(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Run one statement: the rule from its snapshot, the current row under the lock, fenced."""
        row, done = state.row, _with(state, index, _IDLE)
        if row is None:
            yield "finds nothing", done
            return
        is_held = row.state == SENDING and row.attempt_count == worker.attempt_count
        state_fits = row.state == SENDING or (row.state == PENDING and Guard.STATE_IN_FORGET in self.without)
        token_fits = row.attempt_count == worker.attempt_count or Guard.TOKEN_IN_FORGET in self.without
        if not (state_fits and token_fits):
            yield "finds its lease lost", done
            return
        if not (worker.forgets or Guard.RULE_IN_FORGET in self.without):
            fault = "" if is_held else "the write of a stale owner took effect"
            yield "keeps it as sent", done._replace(row=row._replace(state=SENT, is_lapsed=False), fault=fault)
            return
        fault = ""
        if not is_held:
            fault = "a stale owner deleted what somebody else has or is to have"
        elif not row.handed_over:
            fault = "a message is deleted that nobody handed over"
        elif not worker.forgets:
            fault = "a message is deleted though no rule says so"
        yield "deletes it", done._replace(row=None, fault=fault)

    def _fail(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        row, done = state.row, _with(state, index, _IDLE)
        if row is None or row.state != SENDING or row.attempt_count != worker.attempt_count:
            yield "finds its lease lost", done
        else:
            is_last = row.attempt_count >= self.max_attempts + (self.redrives - state.redrives)
            after = row._replace(state=FAILED if is_last else PENDING, is_lapsed=False)
            yield f"finishes it: {after.state}", done._replace(row=after)

    # --- operator -----------------------------------------------------------------------------------------------------

    def _operate(self, state: World) -> Iterator[Step]:
        if state.changes:
            verb = "unset" if state.has_rule else "set"
            yield f"the rule is {verb}", state._replace(has_rule=not state.has_rule, changes=state.changes - 1)
        if state.redrives and state.row is not None and state.row.state == FAILED:
            back = state._replace(row=state.row._replace(state=PENDING), redrives=state.redrives - 1)
            yield "it is redriven", back

    def _prune(self, state: World) -> Iterator[Step]:
        """Delete final messages by a rule or an operator's command. This model accepts both."""
        row = state.row
        if not state.prune and row is not None and row.state in _FINAL:
            yield "a prune sees it as final", state._replace(prune=row.state)
        elif state.prune:
            done = state._replace(prune="")
            is_locked = state.resend == "has copied" and Guard.SOURCE_LOCKED not in self.without
            if row is None or is_locked:
                yield "the prune leaves it", done
            elif row.state == state.prune or Guard.STATE_IN_PRUNE in self.without:
                fault = "" if row.state in _FINAL else "a prune deleted an owed message"
                yield "the prune deletes it", done._replace(row=None, fault=fault)
            else:
                yield "the prune finds it changed", done

    def _prune_contents(self, state: World) -> Iterator[Step]:
        """The snapshot determines which messages name a content; it lacks an uncommitted copy."""
        is_named = state.row is not None or state.copy
        if not state.prune_of_contents and state.content:
            if not is_named or Guard.CONTENT_IS_NAMED in self.without:
                yield "a prune sees that nothing names the content", state._replace(prune_of_contents="has seen it")
        elif state.prune_of_contents:
            yield "the prune deletes the content", state._replace(prune_of_contents="", content=False)

    def _resend(self, state: World) -> Iterator[Step]:
        row = state.row
        if state.resend == "may" and row is not None and row.state == SENT:
            yield "a resend copies it", state._replace(resend="has copied")
        elif state.resend == "has copied":
            yield "the resend is rolled back", state._replace(resend="")
            if row is None:
                # The copy is marked with a deleted content: it names none.
                lost = "a copy lost the content of its source"
                yield "the resend commits", state._replace(resend="", fault=lost)
            yield "the resend, marked before, commits", state._replace(resend="", copy=True)


# --- state ------------------------------------------------------------------------------------------------------------


def _with(state: World, index: int, worker: Worker) -> World:
    workers = (worker, state.workers[1]) if index == 0 else (state.workers[0], worker)
    return state._replace(workers=workers)
