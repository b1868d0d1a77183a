"""The model of the rule `pending`: producers that draw an id and commit in any order, claims in their steps,
retries.

A claim takes a snapshot, locks its messages, locks the newer messages for which it skips, inserts into the index of
messages in flight, and commits. A retry is a snapshot and a commit. From a message's commit on, an attempt of the
key is owed; it begins when its claim commits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pgoutbox.message import State

PENDING, SENDING, SENT = State.PENDING.value, State.SENDING.value, State.SENT.value
FAILED, SKIPPED = State.FAILED.value, State.SKIPPED.value
OPEN, GONE = "open", "gone"  # Before the commit, and after a rollback.


class Guard(enum.Enum):
    """The guards of the protocol; a model can leave out any of them."""

    NEWER_LOCKED = "a claim locks the newer message for which it skips, and finds it pending"
    NEWER_IS_DUE = "a message that is not due yet supersedes nothing"
    NEWER_IS_PENDING = "a message that was attempted or has ended supersedes nothing"
    IN_FLIGHT_INDEX = "the unique index message_live_in_flight, with the rule pending"
    SIBLINGS = "a claim passes over a message of the rule pending whose sibling is in flight"
    LOST_SUPERSEDED = "a claim ends a lost attempt that a newer message supersedes"
    RETRY_SUPERSEDED = "FINISH_IF_HELD ends a retry that a newer message supersedes"


class Row(NamedTuple):
    """A message. `is_owed`: no attempt of the key has begun since its commit."""

    id: int
    state: str = OPEN
    is_due: bool = True
    is_owed: bool = False
    attempt_count: int = 0
    is_lapsed: bool = False


class Claimer(NamedTuple):
    """A claiming worker: its snapshot, the messages it has locked, and their next states."""

    at: str = "idle"
    seen: tuple[Row, ...] = ()
    taken: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    begins: int = 0


class Retry(NamedTuple):
    """A finish in progress: its attempt, and the newer message of its snapshot."""

    id: int
    attempt_count: int
    newer_id: int


class World(NamedTuple):
    """The complete state."""

    rows: tuple[Row, ...]
    claimers: tuple[Claimer, ...]
    retry: Retry | None = None
    fault: str = ""


Step = tuple[str, World]
_IDLE = Claimer()


@dataclass(frozen=True, slots=True)
class PendingRule:
    """The model of two workers and this many messages of one key, of which the last `scheduled` are not due at their
    commit."""

    messages: int = 3
    scheduled: int = 0
    max_attempts: int = 1
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        due_count = self.messages - self.scheduled
        rows = tuple(Row(number, is_due=number <= due_count) for number in range(1, self.messages + 1))
        return World(rows, (_IDLE, _IDLE))

    def canonical(self, state: World) -> World:
        return state if state.claimers[0] <= state.claimers[1] else state._replace(claimers=state.claimers[::-1])

    def fault(self, state: World) -> str:
        if state.fault:
            return state.fault
        if sum(row.state == SENDING for row in state.rows) > 1:
            return "two messages of one key are in flight"
        if any(row.is_owed for row in state.rows) and not any(row.state in (PENDING, SENDING) for row in state.rows):
            return "a message was committed, and no attempt began afterwards"
        return ""

    def is_settled(self, state: World) -> bool:
        are_final = all(row.state in (SENT, FAILED, SKIPPED, GONE) for row in state.rows)
        return are_final and state.claimers == (_IDLE, _IDLE) and state.retry is None

    def steps(self, state: World) -> Iterator[Step]:
        for row in state.rows:
            for label, after in _alone(row):
                yield f"message {row.id} {label}", _with_row(state, after)
            if row.state == SENDING:
                yield from self._retry(state, row)
        if state.retry is not None:
            yield self._end_retry(state, state.retry)
        for index, claimer in enumerate(state.claimers):
            for label, following in self._claim(state, index, claimer):
                yield f"worker {index + 1} {label}", following
            if claimer.at != "idle":
                yield f"worker {index + 1} dies", _with(state, index, _IDLE)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _retry(self, state: World, row: Row) -> Iterator[Step]:
        if state.retry is None and not row.is_lapsed and row.attempt_count < self.max_attempts:
            newer_id = 0 if Guard.RETRY_SUPERSEDED in self.without else self._newer(state.rows, row)
            retry = Retry(row.id, row.attempt_count, newer_id)
            yield f"message {row.id} is to be tried again", state._replace(retry=retry)

    def _end_retry(self, state: World, retry: Retry) -> Step:
        """Write if the attempt still holds its message."""
        row = state.rows[retry.id - 1]
        following = state._replace(retry=None)
        if (row.state, row.attempt_count) != (SENDING, retry.attempt_count) or _is_locked(state, row.id):
            return f"message {row.id} keeps its state", following
        if retry.newer_id:
            ended = row._replace(state=SKIPPED, is_lapsed=False)
            return f"message {row.id} ends, superseded by {retry.newer_id}", _with_row(following, ended)
        fault = ""
        if self._newer(state.rows, row) and Guard.RETRY_SUPERSEDED in self.without:
            fault = "an attempt is made again although a newer message was pending"
        again = row._replace(state=PENDING, is_due=False, is_lapsed=False)
        return f"message {row.id} waits for its retry", _with_row(following, again)._replace(fault=fault)

    # --- claim --------------------------------------------------------------------------------------------------------

    def _claim(self, state: World, index: int, claimer: Claimer) -> Iterator[Step]:
        other = state.claimers[1 - index]
        match claimer.at:
            case "idle":
                if any(self._is_candidate(row, state.rows) for row in state.rows):
                    yield "looks", _with(state, index, Claimer("looked", seen=state.rows))
            case "looked":
                yield from self._lock(state, index, claimer, other)
            case "locked":
                yield self._lock_newer(state, index, claimer, other)
            case "chosen":
                yield from self._enter(state, index, claimer, other)
            case "entered":
                yield "commits", self._commit(state, index, claimer)

    def _newer(self, rows: tuple[Row, ...], older: Row) -> int:
        """Return the newest of the messages that supersede this one."""
        states = (PENDING,) if Guard.NEWER_IS_PENDING not in self.without else (PENDING, SENT, FAILED, SKIPPED)
        return max(
            (
                row.id
                for row in rows
                if row.id > older.id
                and row.state in states
                and (row.is_due or (row.state == PENDING and Guard.NEWER_IS_DUE in self.without))
            ),
            default=0,
        )

    def _is_candidate(self, row: Row, rows: tuple[Row, ...]) -> bool:
        if row.state == SENDING:
            return row.is_lapsed
        if row.state != PENDING or not row.is_due:
            return False
        has_sibling = any(r.state == SENDING for r in rows) and Guard.SIBLINGS not in self.without
        return not has_sibling or self._newer(rows, row) > 0

    def _lock(self, state: World, index: int, claimer: Claimer, other: Claimer) -> Iterator[Step]:
        """Lock the unlocked messages that have not changed since the snapshot, up to the limit."""
        found = [
            row.id
            for row in claimer.seen
            if self._is_candidate(row, claimer.seen)
            and row.id not in other.taken + other.shared
            and state.rows[row.id - 1]._replace(is_owed=row.is_owed) == row
        ]
        for limit in {min(1, len(found)), len(found)}:
            taken = tuple(found[:limit])
            yield f"locks {taken}", _with(state, index, claimer._replace(at="locked", taken=taken))

    def _lock_newer(self, state: World, index: int, claimer: Claimer, other: Claimer) -> Step:
        skips, shared, begins = [], [], 0
        fault = ""
        for number in claimer.taken:
            row = claimer.seen[number - 1]
            newer_id = self._newer(claimer.seen, row)
            if row.state == SENDING and Guard.LOST_SUPERSEDED in self.without:
                if newer_id:
                    fault = "a lost attempt is made again although a newer message was pending"
                newer_id = 0
            if not newer_id:
                begins = number
                continue
            newer = state.rows[newer_id - 1]
            is_due = newer.is_due or Guard.NEWER_IS_DUE in self.without
            is_free = newer.state == PENDING and is_due and newer_id not in other.taken
            if row.state == PENDING and not is_free and not {Guard.NEWER_LOCKED, Guard.NEWER_IS_PENDING} & self.without:
                continue  # It does not change.
            if not newer.is_due:
                fault = "a message that is due waits for one that is not"
            if is_free and Guard.NEWER_LOCKED not in self.without:
                shared.append(newer_id)
            skips.append((number, newer_id))
        chosen = claimer._replace(at="chosen", skips=tuple(skips), shared=tuple(sorted(set(shared))), begins=begins)
        return f"skips {skips}, begins {begins or 'none'}", _with(state, index, chosen)._replace(fault=fault)

    def _enter(self, state: World, index: int, claimer: Claimer, other: Claimer) -> Iterator[Step]:
        """The index makes the second of two claims wait for the first, and refuses the second if the first commits."""
        entered = _with(state, index, claimer._replace(at="entered"))
        if not claimer.begins or Guard.IN_FLIGHT_INDEX in self.without:
            yield "enters", entered
        elif any(row.state == SENDING and row.id != claimer.begins for row in state.rows):
            fault = ""
            if any(row.state == SENDING and row.id != claimer.begins for row in claimer.seen):
                fault = "a whole claim fails because of a message that it could have skipped"
            yield "is refused", _with(state, index, _IDLE)._replace(fault=fault)
        elif other.at != "entered" or not other.begins:
            yield "enters", entered

    def _commit(self, state: World, index: int, claimer: Claimer) -> World:
        rows = {row.id: row for row in state.rows}
        for number, _ in claimer.skips:
            rows[number] = rows[number]._replace(state=SKIPPED, is_lapsed=False)
        if claimer.begins:
            row = rows[claimer.begins]
            if row.attempt_count >= self.max_attempts:
                rows[row.id] = row._replace(state=FAILED, is_lapsed=False)
            else:
                rows[row.id] = row._replace(state=SENDING, attempt_count=row.attempt_count + 1, is_lapsed=False)
                rows = {number: each._replace(is_owed=False) for number, each in rows.items()}
        return _with(state, index, _IDLE)._replace(rows=tuple(rows.values()))


# --- state ------------------------------------------------------------------------------------------------------------


def _alone(row: Row) -> Iterator[tuple[str, Row]]:
    """Change a message without a claim."""
    if row.state == OPEN:
        yield "commits", row._replace(state=PENDING, is_owed=True)
        yield "is rolled back", row._replace(state=GONE)
    elif row.state == PENDING and not row.is_due:
        yield "falls due", row._replace(is_due=True)
    elif row.state == SENDING and not row.is_lapsed:
        yield "is sent", row._replace(state=SENT)
        yield "is lost", row._replace(is_lapsed=True)


def _is_locked(state: World, number: int) -> bool:
    return any(number in claimer.taken for claimer in state.claimers)


def _with(state: World, index: int, claimer: Claimer) -> World:
    claimers = (claimer, state.claimers[1]) if index == 0 else (state.claimers[0], claimer)
    return state._replace(claimers=claimers)


def _with_row(state: World, row: Row) -> World:
    return state._replace(rows=tuple(row if old.id == row.id else old for old in state.rows))
