"""The model of one circuit breaker: workers with their own memory, the row that they share, and a destination.

There are always messages to send. A worker that considers the destination alive sends, and queries the row if the
send fails. A worker that knows of the failure waits, and then asks for permission to probe. Between any two steps
the destination may die or recover, pauses may end, probes may count as lost, and workers may die and restart.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Guard(enum.Enum):
    """Guards of the protocol that a model can leave out."""

    ONE_PROBE = "BREAKER_PROBE allows no probe while another is in progress"
    PROBE_LAPSES = "BREAKER_PROBE allows another probe when one has taken too long"
    FENCE_IN_CLOSE = "the probe's id in BREAKER_CLOSE_IF_NEWER"
    FENCE_IN_REOPEN = "the probe's id in BREAKER_REOPEN_IF_PROBING"
    FENCE_IN_RELEASE = "the probe's id in BREAKER_RELEASE_IF_PROBING"
    ASKED_AFTER_FAILURE = "a worker asks the row after every failure, not only after the one that trips"
    ASKED_TWICE = "a worker that trips and is not answered asks once more"
    STALE_ROW = "a message that had to wait and was sent asks whether the row is still there"
    CLOSED_ELSEWHERE = "a worker that finds no row to probe for forgets that it was open"
    SNOOZED = "an attempt that ends while its worker knows of the row is not used up"


class Shared(NamedTuple):
    """The row. `probe` is the id of the current probe; `is_waiting` is true during the pause."""

    probe: int = 0
    is_lapsed: bool = False
    is_waiting: bool = True


class Worker(NamedTuple):
    """A worker's step, its knowledge (closed, open, half open), and the id of its probe.

    `saw`: its query's snapshot contained the row. `was_open`: the row has existed since its send began.
    `is_given_up`: its probe counts as lost.
    """

    at: str = "idle"
    knows: str = "closed"
    probe: int = 0
    trips: bool = False
    saw: bool = False
    was_open: bool = False
    is_given_up: bool = False


class World(NamedTuple):
    """The complete state. `changes` is how often the destination can still die or recover; it ends alive."""

    row: Shared | None
    workers: tuple[Worker, ...]
    changes: int
    fault: str = ""

    @property
    def is_alive(self) -> bool:
        return self.changes % 2 == 0


Step = tuple[str, World]
_NEW = Worker()


@dataclass(frozen=True, slots=True)
class Breaker:
    """This many workers, and a destination that dies `deaths` times. With `may_lose`, workers are killed."""

    workers: int = 2
    deaths: int = 1
    may_lose: bool = True
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        return World(None, (_NEW,) * self.workers, 2 * self.deaths)

    def canonical(self, state: World) -> World:
        """Rename the ids, of which only equality matters: the row's is 1, the others follow."""
        workers = sorted(state.workers)
        names = {0: 0}
        for probe in ([] if state.row is None else [state.row.probe]) + [worker.probe for worker in workers]:
            names.setdefault(probe, len(names))
        row = None if state.row is None else state.row._replace(probe=names[state.row.probe])
        return state._replace(row=row, workers=tuple(sorted(w._replace(probe=names[w.probe]) for w in workers)))

    def fault(self, state: World) -> str:
        if state.fault:
            return state.fault
        out = sum(worker.probe > 0 and not worker.is_given_up for worker in state.workers)
        return "two probes are let through at once" if out > 1 else ""

    def is_settled(self, state: World) -> bool:
        return state.row is None and not state.changes and all(worker == _NEW for worker in state.workers)

    def steps(self, state: World) -> Iterator[Step]:
        if state.changes:
            after = state._replace(changes=state.changes - 1)
            yield "the destination " + ("dies" if state.is_alive else "comes back"), after
        row = state.row
        if row is not None and row.is_waiting:
            yield "the pause of the row is over", state._replace(row=row._replace(is_waiting=False))
        if row is not None and row.probe and not row.is_lapsed:
            workers = tuple(w._replace(is_given_up=True) if w.probe == row.probe else w for w in state.workers)
            lapsed = state._replace(row=row._replace(is_lapsed=True), workers=workers)
            yield "the probe counts as lost", lapsed
        for index, worker in enumerate(state.workers):
            for label, following in self._work(state, index, worker):
                yield f"worker {index + 1} {label}", following
            if self.may_lose and worker != _NEW:
                yield f"worker {index + 1} dies and is started anew", _with(state, index, _NEW)

    def _work(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        match worker.at:
            case "idle":
                yield from self._begin(state, index, worker)
            case "sends":
                yield from self._end_send(state, index, worker)
            case "asks" | "asks again":
                saw = state.row is not None
                yield "asks after its failure", _with(state, index, worker._replace(at=f"{worker.at}, saw", saw=saw))
            case "asks, saw" | "asks again, saw":
                yield from self._record(state, index, worker)
            case "asks to probe" | "looks":
                yield from self._ask_to_probe(state, index, worker)
            case _:
                yield from self._probe(state, index, worker)

    # --- closed -------------------------------------------------------------------------------------------------------

    def _begin(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        match worker.knows:
            case "closed":
                now = worker._replace(at="sends", was_open=state.row is not None)
                yield "sends a message", _with(state, index, now)
            case "open":
                yield "has waited long enough", _with(state, index, worker._replace(knows="half open"))
                if state.row is None:
                    yield "refreshes and finds it closed", _with(state, index, Worker())
            case _:
                yield "wants to probe", _with(state, index, worker._replace(at="asks to probe"))

    def _end_send(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        idle = Worker(knows=worker.knows)
        if not state.is_alive:
            for trips in (False, True):
                label = "fails, once too often" if trips else "fails"
                now = worker._replace(at="asks", trips=trips)
                if not trips and Guard.ASKED_AFTER_FAILURE in self.without:
                    yield label, _with(state, index, idle)._replace(fault=self._used_up(worker))
                else:
                    yield label, _with(state, index, now)
            return
        yield "sends it", _with(state, index, idle)
        if Guard.STALE_ROW not in self.without:
            yield "sends one that had to wait", _with(state, index, idle._replace(at="looks"))

    def _record(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """BREAKER_FAILED: its insert sees the current row, and its answer the row of its snapshot."""
        idle = Worker(knows="open")
        row = state.row
        is_free = row is not None and not row.is_waiting and (not row.probe or row.is_lapsed)
        if worker.saw and worker.trips and is_free:
            yield "prolongs the pause without having asked for leave", _with(state, index, idle)._replace(row=Shared())
        elif worker.saw:
            fault = self._used_up(worker) if Guard.SNOOZED in self.without else ""
            yield "hears that it is open", _with(state, index, idle)._replace(fault=fault)
        elif not worker.trips:
            unaware = _with(state, index, Worker(knows=worker.knows))
            yield "hears of no row: its attempt is used up", unaware._replace(fault=self._used_up(worker))
        elif row is None:
            yield "opens it", _with(state, index, idle)._replace(row=Shared())
        elif worker.at == "asks, saw" and Guard.ASKED_TWICE not in self.without:
            again = worker._replace(at="asks again", was_open=True)
            yield "hears nothing, and asks once more", _with(state, index, again)
        else:
            # Two openings within two queries, with a successful probe between them, are not distinguished.
            known = worker if worker.at == "asks again, saw" else worker._replace(was_open=True)
            unaware = _with(state, index, Worker(knows=worker.knows))
            yield "hears nothing: its attempt is used up", unaware._replace(fault=self._used_up(known))

    def _used_up(self, worker: Worker) -> str:
        return "an attempt is used up though the breaker was open" if worker.was_open else ""

    # --- open ---------------------------------------------------------------------------------------------------------

    def _ask_to_probe(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        row = state.row
        knows = "closed" if worker.at == "looks" else worker.knows
        if row is None:
            closed = Guard.CLOSED_ELSEWHERE not in self.without
            yield "hears that it is closed", _with(state, index, Worker(knows="closed" if closed else knows))
            return
        is_free = not row.probe or (row.is_lapsed and Guard.PROBE_LAPSES not in self.without)
        if row.is_waiting or not (is_free or Guard.ONE_PROBE in self.without):
            yield "is told to wait", _with(state, index, Worker(knows="open"))
            return
        probe = max(row.probe, *(other.probe for other in state.workers)) + 1
        at = "arrived" if worker.at == "looks" else "probes"
        won = _with(state, index, Worker(at, knows, probe))
        yield "may probe", won._replace(row=row._replace(probe=probe, is_lapsed=False))

    def _probe(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        row = state.row
        is_mine = row is not None and row.probe == worker.probe
        match worker.at:
            case "probes":
                at = "arrived" if state.is_alive else "refused"
                yield f"has its probe {at}", _with(state, index, worker._replace(at=at))
                yield "cannot tell by its probe", _with(state, index, worker._replace(at="unsure"))
            case "arrived":
                done = _with(state, index, _NEW)
                if is_mine or (row is not None and Guard.FENCE_IN_CLOSE in self.without):
                    done = _closed(done)._replace(fault="" if is_mine else _STALE)
                yield "closes it", done
            case "refused":
                done = _with(state, index, Worker(knows="open"))
                if is_mine or (row is not None and Guard.FENCE_IN_REOPEN in self.without):
                    done = done._replace(row=Shared(), fault="" if is_mine else _STALE)
                yield "reopens it", done
            case "unsure":
                done = _with(state, index, Worker(knows="half open"))
                if row is not None and (is_mine or Guard.FENCE_IN_RELEASE in self.without):
                    free = row._replace(probe=0, is_lapsed=False)
                    done = done._replace(row=free, fault="" if is_mine else _STALE)
                yield "gives its leave back", done


_STALE = "a probe that was given up decides"


# --- state ------------------------------------------------------------------------------------------------------------


def _with(state: World, index: int, worker: Worker) -> World:
    return state._replace(workers=(*state.workers[:index], worker, *state.workers[index + 1 :]))


def _closed(state: World) -> World:
    """Delete the row. From now on no worker can learn that it was open."""
    return state._replace(row=None, workers=tuple(worker._replace(was_open=False) for worker in state.workers))
