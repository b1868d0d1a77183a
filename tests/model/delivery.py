"""The model of claim, lease, finish, cancel, supersession and redrive: every statement in its steps, with crashes
between any two.

A statement takes a snapshot, locks rows, reads them again, and writes. Others see its writes after the commit. An
external hand-over happens between claim and finish, and nothing can undo it. Rows are kept in commit order, to which
the promises refer; the statements know only ids.

While a message is in flight, only its worker writes its row. The lease of its attempt is in the row of the claim that
began it. A cancel of a message in flight, or of a locked one, is a row of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pgoutbox.message import State
from tests.support.transitions import TRANSITIONS

PENDING, SENDING, SENT = State.PENDING.value, State.SENDING.value, State.SENT.value
FAILED, SKIPPED, CANCELLED = State.FAILED.value, State.SKIPPED.value, State.CANCELLED.value
_ALLOWED = {(before.value, after.value) for before, afters in TRANSITIONS.items() for after in afters}


class Guard(enum.Enum):
    """Guards of the protocol that a model can leave out."""

    TOKEN_IN_SENT = "the attempt count in finish_sent.sql"
    TOKEN_IN_FINISH = "the attempt count in finish.sql"
    WORKER_IN_SENT = "the worker's name in finish_sent.sql"
    WORKER_IN_FINISH = "the worker's name in finish.sql"
    CLAIM_IN_SENT = "the time of the claim in finish_sent.sql"
    LAST_IN_BATCH = "a batch of finish_sent.sql names only the last known attempt of a message"
    CLAIM_IN_FINISH = "the time of the claim in finish.sql"
    STATE_IN_SENT = "the state in finish_sent.sql"
    STATE_IN_FINISH = "the state in finish.sql"
    COUNT_KEPT_BY_REDRIVE = "redrive leaves attempt_count alone"
    COUNT_KEPT_BY_RELEASE = "release leaves attempt_count alone"
    EXPIRED_LEASES = "lapsed.sql finds expired leases"
    SECOND_LOOK = "a claim looks at the row again when it has the lock"
    IN_FLIGHT_INDEX = "the unique index message_live_in_flight"
    SIBLINGS = "a claim passes over a message whose sibling is in flight"
    SUPERSEDED_IN_CLAIM = "a claim ends messages that its snapshot calls superseded"
    SUPERSEDED_ASKED_AGAIN = "a worker asks newest_id again after the commit of a claim"
    SUPERSEDED_IN_FINISH = "finish.sql ends superseded messages"
    SUPERSEDED_IN_REDRIVE = "a redrive refuses superseded messages"
    ID_UNDER_HEAD_LOCK = "enqueue draws the id while it has the head row"
    OWN_LEFT_ALONE = "a claim passes over the lost attempts that its own worker holds"
    FORGOTTEN_CLAIMED = "a claim finds the lost attempts in its worker's name that the worker does not hold"
    OWN_TAKEN_OVER = "a worker that claims a message of its own running attempt continues that attempt"
    ENDS_NOT_REPEATED = "a worker starts a new attempt if its own has ended with a retry"
    FOUND_BY_NAME = "a worker that lost the answer to a claim finds its attempts by its name"
    FOUND_BY_TIME = "it skips the attempts that it claimed before or since"
    TIMEOUT_KEEPS_THREAD = "an attempt whose thread outlives its timeout lasts as long as the thread"
    STOP_KEEPS_THREAD = "a stop leaves an attempt whose thread still runs alone"
    LEASE_ASKED_AGAIN = "a take-over reads the lease again when it has locked the claim"
    LEASE_LOCKED = "a take-over keeps the claim locked until its commit, so that no renewal comes between"
    CLAIM_KEPT = "a finish deletes a claim only if no attempt of it is in flight"
    LAPSED_CLAIM_KEPT = "a lapsed claim is deleted only if no attempt of it is in flight"
    LAPSED_CLAIM_DELETED = "a lapsed claim without attempts in flight is deleted"
    REQUEST_WRITTEN = "a cancel that finds the row locked or in flight writes a request"
    PENDING_ASKED_AGAIN = "a cancel reads the state again when it has locked the row"
    REQUESTS_IN_CLAIM = "a claim ends messages with a request"
    REQUESTS_IN_TAKE_OVER = "a take-over ends messages with a request"
    REQUESTS_IN_FINISH = "finish.sql ends messages with a request"
    REQUESTS_FORGOTTEN = "a redrive deletes the requests of the message"
    SEARCH_BY_THE_CLOCK = "a worker searches from the beginning every poll interval, whatever the traffic"


class Row(NamedTuple):
    """A committed message. `claim_count` stands for the time of its claim. It distinguishes claims, including those
    whose commit a failover lost. Only the model knows the fields after it.
    """

    id: int
    state: str
    attempt_count: int
    max_attempts: int
    worker: int = 0
    claim_count: int = 0
    handed_over: int = 0
    is_unknown: bool = False
    has_no_handler: bool = False


class Claim(NamedTuple):
    """A committed claim: one lease for the attempts that it began. An attempt belongs to the claim of its worker with
    its `claim_count`; its message may have left.
    """

    worker: int
    number: int
    ids: tuple[int, ...]
    is_lapsed: bool = False


class Candidate(NamedTuple):
    """The fields of a row that a claim's snapshot has seen."""

    id: int
    is_fresh: bool
    waits: bool
    is_requested: bool
    is_promised: bool
    seen: Row | None


class Worker(NamedTuple):
    """A worker, its open transaction and the attempt that it believes to hold. `has_thread`: it has ended an attempt
    whose thread still runs. `leases`: the claims that it has locked. `is_lost`: a failover has lost the message of its
    attempt, and another message has its id. `batch`: the claims that its finish as sent names.
    """

    at: str = "idle"
    id: int = 0
    attempt_count: int = 0
    claim: int = 0
    outcome: str = ""
    has_handed_over: bool = False
    is_superseded: bool = False
    has_thread: bool = False
    head: int = 0
    is_requested: bool = False
    candidates: tuple[Candidate, ...] = ()
    writes: tuple[Row, ...] = ()
    leases: tuple[tuple[int, int], ...] = ()
    is_lost: bool = False
    batch: tuple[int, ...] = ()


class Producer(NamedTuple):
    """A producer: the number of transactions left, and the id in the open one."""

    left: int
    at: str = "idle"
    id: int = 0


class Canceller(NamedTuple):
    """A business transaction that cancels a message: the number of transactions left, and the state of the open one."""

    left: int
    at: str = "idle"
    id: int = 0


class Operator(NamedTuple):
    """An operator: the number of redrives left, and the snapshot of the current statement."""

    left: int
    id: int = 0
    head: int = 0


class Database(NamedTuple):
    """The committed tables, apart from `head`. Only the model knows `promised`: the messages whose cancel was answered
    `requested` and committed.
    """

    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    requests: frozenset[int] = frozenset()
    promised: frozenset[int] = frozenset()


class World(NamedTuple):
    """The complete state. `head` is the newest committed id of the key; `standby` is the state that a standby knows.
    `passed` has for each worker the messages that a search has passed over: only a search from the beginning finds
    them.
    """

    rows: tuple[Row, ...]
    producers: tuple[Producer, ...]
    workers: tuple[Worker, ...]
    operator: Operator
    canceller: Canceller
    releases: int
    claims: tuple[Claim, ...] = ()
    requests: frozenset[int] = frozenset()
    promised: frozenset[int] = frozenset()
    passed: tuple[frozenset[int], ...] = (frozenset(), frozenset())
    head: int = 0
    failovers: int = 0
    standby: Database | None = None
    fault: str = ""


Step = tuple[str, World]
_IDLE = Worker()
_IN_HAND = ("holds", "handed over", "ended", "finishing", "written")


@dataclass(frozen=True, slots=True)
class Delivery:
    """Two workers. `producers` gives the number of transactions of each producer, all for one coalesce key.
    Without producers there are `messages` without a key.

    `is_strict` also reports a fault if a statement that knows a message to be superseded does not end it. With
    `failovers`, commits are lost. With `share_process`, the two workers are two slots of one process with one name;
    otherwise, where the name counts, no new worker takes their place. Where answers to claims are lost, `releases`
    limits the releases. `flows`: other messages, which are not modelled, never end, so a worker never is idle for a
    poll interval. `loses_messages`: a failover may also lose a message, and another message gets its id.
    """

    producers: tuple[int, ...] = ()
    messages: int = 1
    cancels: int = 0
    flows: bool = False
    max_attempts: int = 1
    redrives: int = 0
    releases: int = 0
    renews: bool = False
    is_strict: bool = True
    failovers: int = 0
    share_process: bool = False
    lose_answers: bool = False
    have_threads: bool = False
    loses_messages: bool = False
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        numbers = range(1, self.messages + 1) if not self.producers else ()
        return World(
            tuple(Row(number, PENDING, 0, self.max_attempts) for number in numbers),
            tuple(Producer(left) for left in self.producers),
            (_IDLE, _IDLE),
            Operator(self.redrives),
            Canceller(self.cancels),
            self.releases,
            failovers=self.failovers,
        )

    def canonical(self, state: World) -> World:
        one, other = state.workers
        if other < one and (self.share_process or not self._has_names):
            state = state._replace(workers=(other, one), passed=state.passed[::-1])
        if len(state.producers) > 1 and state.producers[1] < state.producers[0]:
            state = state._replace(producers=state.producers[::-1])
        return state

    def fault(self, state: World) -> str:
        if state.fault:
            return state.fault
        if self.producers and sum(row.state == SENDING for row in state.rows) > 1:
            return "two messages of one key are in flight"
        if self.share_process and all(worker.at in _IN_HAND for worker in state.workers):
            one, other = state.workers
            if one.id == other.id and one.is_lost == other.is_lost:
                return "a process attempts one message twice at once"
        if state.rows and state.rows[-1].state == SKIPPED:
            return "the newest committed message was skipped"
        return ""

    def is_settled(self, state: World) -> bool:
        return (
            all(row.state not in (PENDING, SENDING) for row in state.rows)
            and not state.claims
            and state.workers == (_IDLE, _IDLE)
            and state.canceller.at == "idle"
            and all(producer.at == "idle" and not producer.left for producer in state.producers)
        )

    def steps(self, state: World) -> Iterator[Step]:
        for claim in state.claims:
            yield from self._lapse(state, claim)
        for index, producer in enumerate(state.producers):
            for label, following in self._enqueue(state, index, producer):
                yield f"producer {index + 1} {label}", following
        for index, worker in enumerate(state.workers):
            for label, following in self._work(state, index, worker):
                yield f"worker {index + 1} {label}", following
        if self.share_process and state.workers != (_IDLE, _IDLE):
            # The process that replaces it has another name.
            died = state._replace(workers=(_IDLE, _IDLE), **_disowned(_tables(state))._asdict())
            if state.standby is not None:
                died = died._replace(standby=_disowned(state.standby))
            for worker in state.workers:
                died = _with_unknown(died, worker)
            yield "the process dies", died
        yield from self._cancel(state)
        yield from self._redrive(state)
        yield from self._fail_over(state)

    def _lapse(self, state: World, claim: Claim) -> Iterator[Step]:
        """The lease of all attempts of a claim ends. Whoever finds it without attempts in flight deletes it."""
        held = [row for row in state.rows if _belongs(row, claim)]
        name = f"claim {claim.number} of {_names(held or claim.ids)}"
        gone = state._replace(claims=_replaced(state.claims, claim))
        # A lease without attempts guards nothing, so it ends and is forgotten in one step.
        if not held and not _is_leased(state, claim) and Guard.LAPSED_CLAIM_DELETED not in self.without:
            yield f"{name} runs out and is forgotten", gone
        # The model assumes that a worker asks for unknown claims in its name before their leases end.
        is_asked_for = any(row.has_no_handler for row in held) and Guard.FOUND_BY_NAME not in self.without
        if held and not claim.is_lapsed and not is_asked_for:
            lapsed = state._replace(claims=_replaced(state.claims, claim, claim._replace(is_lapsed=True)))
            for row in held:
                lapsed = _with_row(lapsed, row._replace(is_unknown=True))
            ids = frozenset(row.id for row in held)
            passed = tuple(passed - ids for passed in lapsed.passed)
            yield f"the lease of {name} runs out", lapsed._replace(passed=passed)
        if held and claim.is_lapsed and not _is_leased(state, claim) and Guard.LAPSED_CLAIM_KEPT in self.without:
            yield f"{name} is forgotten", gone

    def _fail_over(self, state: World) -> Iterator[Step]:
        """Drop the commits that the standby has not received. Hand-overs remain."""
        if not state.failovers:
            return
        if state.standby is None:
            yield "the standby hears of no more commits", state._replace(standby=_tables(state))
            return
        rows = []
        for row in state.standby.rows:
            now = _row_of(state, row.id)
            rows.append(row._replace(handed_over=now.handed_over, is_unknown=now.is_unknown or now.handed_over > 0))
        taken_over = state._replace(
            **state.standby._replace(rows=tuple(rows))._asdict(),
            standby=None,
            failovers=state.failovers - 1,
            workers=(_cut_off(state.workers[0]), _cut_off(state.workers[1])),
            operator=Operator(state.operator.left),
            canceller=Canceller(state.canceller.left),
        )
        yield "the standby takes over", taken_over
        if self.loses_messages:
            for row in taken_over.rows:
                if row.state == PENDING and not row.attempt_count:  # The standby may not have heard of it either.
                    yield (
                        f"the standby takes over, and another message gets id {row.id}",
                        _with_another(taken_over, row),
                    )

    def _name_of(self, index: int) -> int:
        return 1 if self.share_process else index + 1

    def _worker_of(self, index: int) -> int:
        """Return the worker in a row: its name, or 0 where names do not matter."""
        return self._name_of(index) if self._has_names else 0

    # --- enqueue ------------------------------------------------------------------------------------------------------

    def _enqueue(self, state: World, index: int, producer: Producer) -> Iterator[Step]:
        match producer.at:
            case "idle" if producer.left:
                drawn = producer._replace(at="drawn", id=_next_id(state))
                yield f"begins and draws id {drawn.id}", _with_producer(state, index, drawn)
            case "drawn" if not any(other.at == "locked" for other in state.producers):
                has_head = state.head > 0
                fresh = has_head and Guard.ID_UNDER_HEAD_LOCK not in self.without
                new_id = _next_id(state) if fresh else producer.id
                locked = producer._replace(at="locked", id=new_id)
                yield f"has the head row and inserts message {new_id}", _with_producer(state, index, locked)
            case "locked":
                done = Producer(producer.left - 1)
                yield "rolls back", _with_producer(state, index, done)
                rows = (*state.rows, Row(producer.id, PENDING, 0, self.max_attempts))
                committed = _with_producer(state, index, done)._replace(rows=rows, head=producer.id)
                yield f"commits message {producer.id}", committed

    # --- worker -------------------------------------------------------------------------------------------------------

    def _work(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        if worker.at == "idle":
            yield from self._begin_claim(state, index)
            yield from self._find_by_name(state, index)
            return
        match worker.at:
            case "looked" | "locked" | "entered":
                yield from self._claim(state, index, worker)
            case "begun":
                yield from self._ask_again(state, index, worker)
            case "holds" | "handed over":
                yield from self._attempt(state, index, worker)
            case "outlived":
                fault = "a thread handed over a message whose attempt had ended"
                yield f"HANDS OVER message {worker.id}", _with(state, index, _IDLE)._replace(fault=fault)
                yield "ends the thread", _with(state, index, _IDLE)
            case _:
                yield from self._finish(state, index, worker)
        if self.renews and worker.at in ("holds", "handed over", "ended", "finishing"):
            yield from self._renew(state, index, worker)
        if not self._has_names:
            yield "dies", _with_unknown(_with(state, index, _IDLE), worker)

    # --- claim --------------------------------------------------------------------------------------------------------

    def _claim(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        match worker.at:
            case "looked":
                yield from self._lock(state, index, worker)
            case "locked":
                yield from self._enter(state, index, worker)
            case "entered":
                yield from self._commit_claim(state, index, worker)

    def _begin_claim(self, state: World, index: int) -> Iterator[Step]:
        if not self.flows:
            yield from self._search(state, index, "begins a claim")
            return
        if Guard.SEARCH_BY_THE_CLOCK not in self.without:
            anew = _with_passed(state, index, frozenset())
            yield from self._search(anew, index, "begins a claim from the beginning")
        if state.passed[index] or Guard.SEARCH_BY_THE_CLOCK in self.without:
            yield from self._search(state, index, "begins a claim from the last place")

    def _search(self, state: World, index: int, label: str) -> Iterator[Step]:
        found = []
        passed = state.passed[index]
        for row in state.rows:
            if not self._is_due(state, row) or self._is_own(state, row, index) or row.id in passed:
                continue
            if self.flows:
                state = _with_passed(state, index, state.passed[index] | {row.id})
            has_sibling = bool(self.producers) and any(
                other.state == SENDING and other.id != row.id for other in state.rows
            )
            waits = has_sibling and state.head <= row.id
            if waits and Guard.SIBLINGS not in self.without:
                continue
            seen = row if Guard.SECOND_LOOK in self.without else None
            asked = row.id in state.requests, row.id in state.promised
            found.append(Candidate(row.id, row.attempt_count == 0, waits, *asked, seen))
        if found:
            looked = Worker("looked", head=state.head, candidates=tuple(found))
            yield f"{label} that sees {_names(found)}", _with(state, index, looked)

    def _is_due(self, state: World, row: Row) -> bool:
        """The due time of a retry is not modelled: it may be due at any time."""
        return row.state == PENDING or (
            row.state == SENDING and _is_lapsed(state, row) and Guard.EXPIRED_LEASES not in self.without
        )

    def _is_own(self, state: World, row: Row, index: int) -> bool:
        """Return whether a claim of this worker leaves the attempt to that worker."""
        if not self._has_names or row.state != SENDING or row.worker != self._name_of(index):
            return False
        guard = Guard.OWN_LEFT_ALONE if self._is_in_hand(state, row, index) else Guard.FORGOTTEN_CLAIMED
        return (guard is Guard.OWN_LEFT_ALONE) == (guard not in self.without)

    def _is_in_hand(self, state: World, row: Row, index: int) -> bool:
        slots = state.workers if self.share_process else (state.workers[index],)
        return any(slot.id == row.id and slot.at in _IN_HAND for slot in slots)

    @property
    def _has_names(self) -> bool:
        """Return whether names matter here. If not, workers may be slots of one process."""
        return self.failovers > 0 or self.share_process or self.lose_answers

    def _lock(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Lock with FOR UPDATE SKIP LOCKED: return the current row if it still matches the query."""
        held: list[tuple[Candidate, Row]] = []
        for candidate in worker.candidates:
            row = _row_of(state, candidate.id)
            if _is_locked(state, row.id, index):
                continue
            if candidate.seen is not None:
                held.append((candidate, candidate.seen))
            elif (
                (
                    self._is_due(state, row)
                    or (row.state == SENDING and not candidate.is_fresh and Guard.LEASE_ASKED_AGAIN in self.without)
                )
                and not self._is_own(state, row, index)
                and candidate.is_fresh == (row.attempt_count == 0)
            ):
                held.append((candidate, row))
        if not held:
            yield "finds nothing that it can lock", _with(state, index, _IDLE)
            return
        # The limit and the due times, which choose among several messages, are not modelled.
        for choice in [held, *([one] for one in held)] if len(held) > 1 else [held]:
            if (
                not self.producers
                and len(choice) > 1
                and not (self.share_process and state.workers[1 - index] == _IDLE)
            ):
                continue  # A worker claims no more messages than it has free slots.
            candidates, rows = zip(*choice, strict=True)
            leases = (
                ()
                if Guard.LEASE_LOCKED in self.without
                else tuple((row.id, row.claim_count) for row in rows if row.state == SENDING)
            )
            locked = worker._replace(at="locked", candidates=candidates, writes=rows, leases=leases)
            yield f"locks {_names(rows)}", _with(state, index, locked)

    def _enter(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Judge by the head row of the snapshot, and insert into the index of messages in flight."""
        writes = tuple(
            self._judge(state, index, row, worker.head, candidate.is_requested)
            for row, candidate in zip(worker.writes, worker.candidates, strict=True)
        )
        yield from self._enter_with(state, index, worker, writes)
        # A lapsed attempt is taken over only if its message is a suspect, which is not modelled.
        ended = tuple(
            before._replace(state=PENDING) if before.state == after.state == SENDING else after
            for before, after in zip(worker.writes, writes, strict=True)
        )
        if ended != writes:
            yield from self._enter_with(state, index, worker, ended)

    def _enter_with(self, state: World, index: int, worker: Worker, writes: tuple[Row, ...]) -> Iterator[Step]:
        if fault := self._fault_of_judgement(state, index, writes):
            yield "ends a message that it must not end", _with(state, index, _IDLE)._replace(fault=fault)
            return
        starting = [row for row in writes if row.state == SENDING]
        if not starting:
            ended = ", ".join(f"{row.id} {row.state}" for row in writes)
            yield f"ends {ended}", _with(state, index, worker._replace(at="entered", writes=writes, candidates=()))
            return
        entered = worker._replace(at="entered", writes=writes, candidates=())
        if self.producers and Guard.IN_FLIGHT_INDEX not in self.without:
            if self._must_wait(state, index):
                return
            if len(starting) > 1 or _is_entered(state, writes):
                waits = {candidate.id for candidate in worker.candidates if candidate.waits}
                fault = ""
                if any(row.id in waits for row in starting):
                    fault = "a whole claim fails because of a message that it could have skipped"
                refused = _with(state, index, _IDLE)._replace(fault=fault)
                yield "is refused by the index: its claim is rolled back", refused
                return
        promised = {candidate.id for candidate in worker.candidates if candidate.is_promised}
        if any(row.id in promised for row in starting):
            fault = "an attempt begins although a cancel was committed before its claim"
            yield f"begins an attempt of {_names(starting)}", _with(state, index, entered)._replace(fault=fault)
            return
        if self.is_strict and any(worker.head > row.id for row in starting):
            fault = "an attempt begins although the claim's snapshot called the message superseded"
            yield f"begins an attempt of {_names(starting)}", _with(state, index, entered)._replace(fault=fault)
            return
        yield f"is in the index with {_names(starting)}", _with(state, index, entered)

    def _fault_of_judgement(self, state: World, index: int, writes: tuple[Row, ...]) -> str:
        if any(row.state == FAILED and row.has_no_handler for row in writes):
            return "a message fails without any attempt"
        other = state.workers[1 - index]
        is_in_hand = self.share_process and other.at in _IN_HAND and other.outcome not in ("retry", "released")
        is_own = any(
            row.id == other.id and row.state not in (SENDING, PENDING) and row.worker == self._name_of(index)
            for row in writes
        )
        if is_in_hand and is_own:
            return "a process gives up a message of its own running attempt"
        if any(candidate.is_requested and not candidate.is_promised for candidate in state.workers[index].candidates):
            return "a request from before its redrive ends a message"
        return ""

    def _judge(self, state: World, index: int, row: Row, head: int, is_requested: bool) -> Row:
        guard = Guard.REQUESTS_IN_CLAIM if row.state == PENDING else Guard.REQUESTS_IN_TAKE_OVER
        if is_requested and guard not in self.without:
            return row._replace(state=CANCELLED)
        if head > row.id and Guard.SUPERSEDED_IN_CLAIM not in self.without:
            return row._replace(state=SKIPPED)
        if row.attempt_count >= row.max_attempts:
            return row._replace(state=FAILED)
        return row._replace(
            state=SENDING,
            attempt_count=row.attempt_count + 1,
            worker=self._worker_of(index),
            claim_count=_next_claim(state, row),
            has_no_handler=False,
        )

    def _must_wait(self, state: World, index: int) -> bool:
        """Wait for an open transaction that inserts or deletes the same index entry."""
        for number, other in enumerate(state.workers):
            if number != index and other.at in ("entered", "written"):
                touched = {row.id for row in other.writes}
                if any(row.state == SENDING for row in other.writes):
                    return True
                if any(row.state == SENDING and row.id in touched for row in state.rows):
                    return True
        return False

    def _ask_again(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Ask for a newer message of the key, before the hand-over: overtaken.sql."""
        asks = Guard.SUPERSEDED_ASKED_AGAIN not in self.without
        is_superseded = asks and state.head > worker.id
        label = "hears that it is superseded" if is_superseded else "hears of nothing newer"
        holds = worker._replace(at="holds", is_superseded=is_superseded)
        yield label if asks else "asks nothing more", _with(state, index, holds)

    def _commit_claim(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        rows = worker.writes
        label = ", ".join(f"{row.id} {row.state} ({row.attempt_count})" for row in rows)
        former = [_row_of(state, row.id) for row in rows]
        is_taken_away = any(row.state == SENDING and not _is_lapsed(state, row) for row in former)
        committed = _commit(state, rows)
        begun = [row for row in rows if row.state == SENDING]
        # The key of a suspect has been in flight all the time, so nothing newer can have been delivered.
        pending = {row.id for row in former if row.state == PENDING} if self.producers else set()
        slots = [
            Worker("begun" if row.id in pending else "holds", row.id, row.attempt_count, row.claim_count)
            for row in begun
        ]
        if begun:
            claim = Claim(begun[0].worker, begun[0].claim_count, tuple(row.id for row in begun))
            committed = committed._replace(claims=tuple(sorted((*committed.claims, claim))))
        if is_taken_away:
            yield f"commits its claim: {label}", committed._replace(fault="a lease that had not lapsed was taken away")
            return
        after, *others = slots or [_IDLE]
        if others:  # The claim fills both slots of the process.
            yield f"commits its claim: {label}", _with(_with(committed, index, after), 1 - index, *others)
            return
        other = state.workers[1 - index]
        is_in_hand = self.share_process and after is not _IDLE and other.id == after.id and other.at in _IN_HAND
        if is_in_hand and other.is_lost:
            # Its attempt has lost its message. Its result is forgotten, unless its finish is running.
            if other.at not in ("finishing", "written") and Guard.LAST_IN_BATCH not in self.without:
                committed = _with(committed, 1 - index, _IDLE)
        elif is_in_hand and other.outcome in ("retry", "released") and Guard.ENDS_NOT_REPEATED not in self.without:
            committed = _with(committed, 1 - index, _IDLE)
        elif is_in_hand and Guard.OWN_TAKEN_OVER not in self.without:
            # If its finish is running, the finish finds nothing, and is repeated with the new number.
            at = "ended" if other.at == "finishing" else other.at
            taken = other._replace(at=at, attempt_count=after.attempt_count, claim=after.claim, batch=())
            fault = ""
            if other.outcome in ("retry", "released"):
                fault = f"an attempt that no handler began ends as {other.outcome}"
            state = _with(_with(committed, index, _IDLE), 1 - index, taken)._replace(fault=fault)
            yield f"commits its claim: {label}, and goes on with what it has in its hands", state
            return
        yield f"commits its claim: {label}", _with(committed, index, after)
        if self.lose_answers and state.releases and after is not _IDLE:
            unheard = _with_row(committed, _row_of(committed, after.id)._replace(has_no_handler=True))
            lost = _with(unheard, index, _IDLE)._replace(releases=state.releases - 1)
            yield f"commits its claim and never hears of it: {label}", lost

    def _find_by_name(self, state: World, index: int) -> Iterator[Step]:
        """Release attempts that the database lists under the worker's name but that are in none of its slots: their
        claims lost their answers. The time of the claim distinguishes them from an attempt whose end a failover has
        lost.
        """
        if not self._has_names or Guard.FOUND_BY_NAME in self.without:
            return
        for row in state.rows:
            is_own = row.state == SENDING and row.worker == self._name_of(index)
            is_asked_for = row.has_no_handler or Guard.FOUND_BY_TIME in self.without
            if (
                is_own
                and is_asked_for
                and not self._is_in_hand(state, row, index)
                and not _is_locked(state, row.id, index)
            ):
                back = row._replace(state=PENDING, max_attempts=row.max_attempts + 1, has_no_handler=False)
                fault = "" if row.has_no_handler else "an attempt that had a handler is given back as if it had none"
                found = _commit(state, (back,))
                yield (
                    f"finds message {row.id} by its name and gives it back",
                    found._replace(fault=found.fault or fault),
                )

    # --- attempt ------------------------------------------------------------------------------------------------------

    def _attempt(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        def ended(outcome: str) -> World:
            return _with(state, index, worker._replace(at="ended", outcome=outcome))

        if worker.is_superseded:
            yield "does not hand over a superseded message", ended("retry")
        elif worker.has_handed_over:
            yield "knows that it was handed over", ended("sent")
            yield "does not know whether it was handed over", _with_unknown(ended("retry"), worker)
        else:
            now = worker._replace(at="handed over", has_handed_over=True)
            yield f"HANDS OVER message {worker.id}", _with(_hand_over(state, worker), index, now)
            yield "fails before the hand-over", ended("retry")
            yield "fails for good", ended("failed")
            if state.releases:
                yield "gives the message back", ended("released")._replace(releases=state.releases - 1)
            # While its thread continues, nothing else happens at a timeout or a stop.
            if self.have_threads and Guard.TIMEOUT_KEEPS_THREAD in self.without:
                timed_out = worker._replace(at="ended", outcome="retry", has_thread=True)
                yield "times out, and its thread goes on", _with(state, index, timed_out)
            if self.have_threads and Guard.STOP_KEEPS_THREAD in self.without:
                stopped = worker._replace(at="ended", outcome="released", has_thread=True)
                yield "is told to stop, and its thread goes on", _with(state, index, stopped)

    def _renew(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Renew the lease of the worker's claim, for the attempts that nobody has taken over."""
        for claim in state.claims:
            is_own = worker.id in claim.ids and (claim.worker, claim.number) == (self._worker_of(index), worker.claim)
            if is_own and claim.is_lapsed and not _is_leased(state, claim):
                renewed = state._replace(claims=_replaced(state.claims, claim, claim._replace(is_lapsed=False)))
                yield f"renews the lease of its claim {claim.number}", renewed

    # --- finish -------------------------------------------------------------------------------------------------------

    def _finish(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        match worker.at:
            case "ended":
                mate = state.workers[1 - index]
                is_mate = self.share_process and mate.at in _IN_HAND
                if (
                    is_mate
                    and mate.id == worker.id
                    and mate.claim > worker.claim
                    and Guard.LAST_IN_BATCH not in self.without
                ):
                    yield "forgets its result: a later claim has its message", _with(state, index, _IDLE)
                    return
                # The attempts of a process end in one batch, which names the claims of all of them.
                joins = (
                    is_mate and mate.outcome == worker.outcome == "sent" and mate.attempt_count == worker.attempt_count
                )
                batch = tuple(sorted({worker.claim, mate.claim})) if joins else ()
                asked = worker.id in state.requests
                now = worker._replace(at="finishing", head=state.head, is_requested=asked, batch=batch)
                yield f"begins to finish attempt {worker.attempt_count} as {worker.outcome}", _with(state, index, now)
            case "finishing":
                yield from self._write_end(state, index, worker)
            case "written":
                yield from self._commit_end(state, index, worker)

    def _write_end(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        row = _row_of(state, worker.id)
        if _is_locked(state, row.id, index):
            return  # Skipped, and repeated.
        if not self._is_held(row, worker, index):
            yield "finds its lease lost", _with(state, index, _IDLE)
            return
        written = self._end(row, worker)
        now = worker._replace(at="written", writes=(written,))
        fault = ""
        returns = worker.outcome in ("retry", "released")
        if returns and worker.is_requested and written.state != CANCELLED:
            fault = f"a message that its finish knows to be cancelled becomes {written.state}"
        elif self.is_strict and returns and worker.head > row.id and written.state not in (SKIPPED, CANCELLED):
            fault = f"a message that its finish knows to be superseded becomes {written.state}"
        yield f"writes {written.state}", _with(state, index, now)._replace(fault=fault)

    def _is_held(self, row: Row, worker: Worker, index: int) -> bool:
        is_sent = worker.outcome == "sent"
        name = Guard.WORKER_IN_SENT if is_sent else Guard.WORKER_IN_FINISH
        token = Guard.TOKEN_IN_SENT if is_sent else Guard.TOKEN_IN_FINISH
        claim = Guard.CLAIM_IN_SENT if is_sent else Guard.CLAIM_IN_FINISH
        states = Guard.STATE_IN_SENT if is_sent else Guard.STATE_IN_FINISH
        return (
            row.state in (PENDING, SENDING)
            and (row.state == SENDING or states in self.without)
            and (row.attempt_count == worker.attempt_count or token in self.without)
            and (not self._has_names or row.worker == self._name_of(index) or name in self.without)
            and (row.claim_count in (worker.batch or (worker.claim,)) or claim in self.without)
        )

    def _end(self, row: Row, worker: Worker) -> Row:
        if worker.outcome in ("sent", "failed"):
            return row._replace(state=worker.outcome)
        if worker.is_requested and Guard.REQUESTS_IN_FINISH not in self.without:
            return row._replace(state=CANCELLED)
        if worker.head > row.id and Guard.SUPERSEDED_IN_FINISH not in self.without:
            return row._replace(state=SKIPPED)
        if worker.outcome == "retry":
            return row._replace(state=FAILED if row.attempt_count >= row.max_attempts else PENDING)
        if Guard.COUNT_KEPT_BY_RELEASE in self.without:
            return row._replace(state=PENDING, attempt_count=row.attempt_count - 1)
        return row._replace(state=PENDING, max_attempts=row.max_attempts + 1)

    def _commit_end(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        (written,) = worker.writes
        row = _row_of(state, worker.id)
        again = worker._replace(at="ended", writes=(), head=0, is_requested=False, batch=())
        yield "is cut off: its finish is rolled back", _with(state, index, again)
        done = _commit(state, worker.writes)
        ended = {claim for claim in done.claims if _belongs(row, claim)}
        if Guard.CLAIM_KEPT not in self.without:
            ended -= {claim for claim in ended for one in done.rows if _belongs(one, claim)}
        done = done._replace(claims=tuple(claim for claim in done.claims if claim not in ended))
        if written.state == PENDING and worker.outcome == "retry":
            done = done._replace(passed=tuple(passed - {row.id} for passed in done.passed))
        if row.state != SENDING or row.claim_count != worker.claim:
            done = done._replace(fault="the write of a stale owner took effect")
        elif written.state == SENT and not row.handed_over:
            done = done._replace(fault="a message is sent without a hand-over")
        after = again._replace(at="outlived", outcome="") if worker.has_thread else _IDLE
        yield f"commits: {row.id} {written.state}", _with(done, index, after)
        yield f"commits and never hears of it: {row.id} {written.state}", _with(done, index, again)

    # --- cancel -------------------------------------------------------------------------------------------------------

    def _cancel(self, state: World) -> Iterator[Step]:
        """Cancel one message in a transaction that may stay open: a pending one at once, another one by a request."""
        canceller = state.canceller
        if canceller.at == "idle":
            for row in state.rows if canceller.left else ():
                if row.state in (PENDING, SENDING):
                    seen = canceller._replace(at=f"saw {row.state}", id=row.id)
                    yield f"a cancel sees message {row.id} {row.state}", state._replace(canceller=seen)
            return
        row = _row_of(state, canceller.id)
        done = state._replace(canceller=Canceller(canceller.left - 1))
        is_free = not any(write.id == row.id for worker in state.workers for write in worker.writes)
        is_pending = row.state == PENDING or (
            row.state == SENDING and canceller.at == "saw pending" and Guard.PENDING_ASKED_AGAIN in self.without
        )
        match canceller.at:
            case "saw pending" if is_free and is_pending:
                holds = state._replace(canceller=canceller._replace(at="cancels"))
                yield f"the cancel has message {row.id} and ends it", holds
            case "saw pending" | "saw sending" if row.state in (PENDING, SENDING):
                asks = state._replace(canceller=canceller._replace(at="requests"))
                yield f"the cancel writes a request for message {row.id}", asks
            case "saw pending" | "saw sending":
                yield f"the cancel hears that message {row.id} is {row.state}", done
            case "cancels":
                yield "the cancel is rolled back", done
                yield f"the cancel of message {row.id} commits", _commit(done, (row._replace(state=CANCELLED),))
            case _:
                yield "the request is rolled back", done
                if Guard.REQUEST_WRITTEN not in self.without:
                    done = done._replace(requests=state.requests | {row.id})
                if row.state in (PENDING, SENDING):
                    done = done._replace(promised=state.promised | {row.id})
                yield f"the request for message {row.id} commits", done

    # --- operator -----------------------------------------------------------------------------------------------------

    def _redrive(self, state: World) -> Iterator[Step]:
        operator = state.operator
        if operator.id:
            row = _row_of(state, operator.id)
            idle = state._replace(operator=Operator(operator.left - 1))
            if operator.head > row.id and Guard.SUPERSEDED_IN_REDRIVE not in self.without:
                yield "the redrive is refused", idle
                return
            count = 0 if Guard.COUNT_KEPT_BY_REDRIVE in self.without else row.attempt_count
            back = row._replace(state=PENDING, attempt_count=count, max_attempts=count + self.max_attempts)
            fault = ""
            if self.is_strict and operator.head > row.id:
                fault = "a redrive revived a message that it knew to be superseded"
            redriven = _commit(idle, (back,))._replace(fault=fault, promised=state.promised - {row.id})
            if Guard.REQUESTS_FORGOTTEN not in self.without:
                redriven = redriven._replace(requests=state.requests - {row.id})
            yield f"the redrive of message {row.id} commits", redriven
        elif operator.left:
            for row in state.rows:
                if row.state in (FAILED, CANCELLED):
                    begun = Operator(operator.left, row.id, state.head)
                    yield f"an operator begins to redrive message {row.id}", state._replace(operator=begun)


# --- state ------------------------------------------------------------------------------------------------------------


def _cut_off(worker: Worker) -> Worker:
    """Return the state of a worker after its connection breaks: a claim in progress is gone, a finish is repeated."""
    match worker.at:
        case "looked" | "locked" | "entered":
            return _IDLE
        case "finishing" | "written":
            return worker._replace(at="ended", head=0, is_requested=False, writes=())
        case _:
            return worker


def _tables(state: World) -> Database:
    return Database(state.rows, state.claims, state.requests, state.promised)


def _disowned(tables: Database) -> Database:
    """Update the attempts of a dead process: nobody can tell any more which of them had no handler."""
    return tables._replace(
        rows=tuple(row._replace(worker=0, has_no_handler=False) for row in tables.rows),
        claims=tuple(claim._replace(worker=0) for claim in tables.claims),
    )


def _belongs(row: Row, claim: Claim) -> bool:
    """Return whether the claim has the lease of the message's attempt."""
    return (
        row.state == SENDING and row.id in claim.ids and (row.worker, row.claim_count) == (claim.worker, claim.number)
    )


def _is_lapsed(state: World, row: Row) -> bool:
    return any(claim.is_lapsed and _belongs(row, claim) for claim in state.claims)


def _is_leased(state: World, claim: Claim) -> bool:
    """Return whether an open take-over has locked the claim."""
    return any(
        message_id in claim.ids and number == claim.number
        for worker in state.workers
        for message_id, number in worker.leases
    )


def _replaced(claims: tuple[Claim, ...], claim: Claim, *by: Claim) -> tuple[Claim, ...]:
    return tuple(sorted((*(other for other in claims if other != claim), *by)))


def _with_passed(state: World, index: int, passed: frozenset[int]) -> World:
    other = state.passed[1 - index]
    return state._replace(passed=(passed, other) if index == 0 else (other, passed))


def _next_claim(state: World, row: Row) -> int:
    """Return a claim number that is greater than all others of this message."""
    return max(row.claim_count, *(worker.claim for worker in state.workers if worker.id == row.id), 0) + 1


def _names(things: Iterable[Candidate | Row | int]) -> str:
    return ", ".join(str(thing if isinstance(thing, int) else thing.id) for thing in things)


def _next_id(state: World) -> int:
    """Return the next number of the sequence. Unreferenced numbers are reused, which reduces the number of states."""
    ids = [row.id for row in state.rows] + [producer.id for producer in state.producers]
    return max([state.head, *ids]) + 1


def _row_of(state: World, message_id: int) -> Row:
    return next(row for row in state.rows if row.id == message_id)


def _with(state: World, index: int, worker: Worker) -> World:
    workers = (worker, state.workers[1]) if index == 0 else (state.workers[0], worker)
    return state._replace(workers=workers)


def _with_producer(state: World, index: int, producer: Producer) -> World:
    return state._replace(producers=(*state.producers[:index], producer, *state.producers[index + 1 :]))


def _with_row(state: World, row: Row) -> World:
    return state._replace(rows=tuple(row if old.id == row.id else old for old in state.rows))


def _with_another(state: World, lost: Row) -> World:
    """Put another message in the place of a lost one. Attempts of the lost one remain in the memory of workers."""
    state = _with_row(state, Row(lost.id, PENDING, 0, lost.max_attempts))
    return state._replace(
        workers=tuple(worker._replace(is_lost=True) if worker.id == lost.id else worker for worker in state.workers)
    )


def _with_unknown(state: World, worker: Worker) -> World:
    """Mark a handed-over message as one that may be handed over again, because no record remains."""
    if not worker.has_handed_over or worker.is_lost:
        return state
    return _with_row(state, _row_of(state, worker.id)._replace(is_unknown=True))


def _is_locked(state: World, message_id: int, index: int) -> bool:
    """Return whether another open transaction holds the row."""
    other = state.workers[1 - index]
    is_cancelled = state.canceller.at == "cancels" and state.canceller.id == message_id
    return is_cancelled or any(row.id == message_id for row in other.writes)


def _is_entered(state: World, writes: tuple[Row, ...]) -> bool:
    """Return whether the index has a sibling that is not one of these."""
    own = {row.id for row in writes}
    return any(row.state == SENDING and row.id not in own for row in state.rows)


def _commit(state: World, writes: tuple[Row, ...]) -> World:
    """Make these rows visible to others. Hand-overs in the meantime remain."""
    fault = state.fault
    for write in writes:
        row = _row_of(state, write.id)
        if (row.state, write.state) not in _ALLOWED:
            fault = f"message {row.id}, {row.state}, became {write.state}"
        state = _with_row(state, write._replace(handed_over=row.handed_over, is_unknown=row.is_unknown))
    return state._replace(fault=fault)


def _hand_over(state: World, worker: Worker) -> World:
    if worker.is_lost:
        return state
    row = _row_of(state, worker.id)
    count = min(row.handed_over + 1, 2)
    if row.state == CANCELLED and row.claim_count == worker.claim and not row.is_unknown:
        return state._replace(fault="a message was handed over after its cancel had been answered")
    if row.state != SENDING or row.claim_count != worker.claim:
        # Its lease has lapsed and another attempt has begun. The fence protects the row, not the receiver.
        return _with_row(state, row._replace(handed_over=count, is_unknown=True))
    fault = ""
    if state.head and any(newer.handed_over for newer in state.rows[state.rows.index(row) + 1 :]):
        fault = "an older message was handed over after a newer one"
    elif row.handed_over and not row.is_unknown:
        fault = "a message was handed over twice without need"
    return _with_row(state, row._replace(handed_over=count, is_unknown=_is_lapsed(state, row)))._replace(fault=fault)
