"""The model of the doorbell: enqueue, arm, claim, sleep, ring, disarm; listeners that break, workers that die.

There is no sweep and nothing falls due, so a wake-up that is missed is missed for good. What the event loop does
without a pause is one step; a statement is two, its effect on locks and its commit. A message is a bit of a mask.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Guard(enum.Enum):
    """What can be taken out of the protocol."""

    RING = "an enqueue that meets an armed bell rings"
    HELD_TO_COMMIT = "an enqueue holds the bell shared until its commit is visible, and does not only test it"
    RELEASED_AFTER_VISIBLE = "PostgreSQL releases the shared bell after the commit is visible, not before"
    CLAIM_AFTER_ARMING = "a worker claims once more after arming"
    PRODUCERS_AWAITED = "a worker that met producers at the bell looks again until they have ended"
    WAKE_CLEARED_FIRST = "a worker forgets the rings that it heard before its claim, not after it"
    RINGS_KEPT_WHILE_ARMING = "what a worker hears while it arms is not forgotten by the claim that follows"
    DISARM_ANNOUNCED = "a bell that is given up is announced"
    LISTEN_FIRST = "a listener that reconnects listens before its worker looks"
    LOOK_AFTER_RECONNECT = "a worker looks when its listener is back"
    LOOK_WHEN_LOST = "a worker looks when its listener is lost"
    SUCCESSORS_ASKED_FOR = "whoever ends a message asks for its successors"
    SUCCESSORS_ASKED_LATE = "it asks for them after its commit, not before"


class Producer(NamedTuple):
    """How many of its messages are done with; `rings` and `is_shared` are about the open transaction."""

    done: int = 0
    at: str = "idle"
    rings: bool = False
    is_shared: bool = False


class Worker(NamedTuple):
    """A worker: where its main task is, its wake-up event, its listener, its claim and what it has in flight.

    `believes` is what the worker thinks of the bell, `has_bell` what the server knows. `link` is up, broken (and nobody
    has noticed), lost (noticed), gone (closed) or deaf (connected, but not listening yet).
    """

    at: str = "looks"
    wake: bool = False
    link: str = "up"
    rings: int = 0
    believes: bool = False
    has_bell: bool = False
    answer: str = ""
    seen: int = 0
    locked: int = 0
    held: int = 0
    asks: int = 0


class World(NamedTuple):
    """Everything: `due` are the messages that are committed and pending."""

    due: int
    producers: tuple[Producer, ...]
    workers: tuple[Worker, ...]
    breaks: int
    deaths: int


Step = tuple[str, World]
_SWAPPED = (0b00, 0b10, 0b01, 0b11)


@dataclass(frozen=True, slots=True)
class Doorbell:
    """`sends` names the messages of each producer, one transaction each; `handles` is each worker's mask of messages.

    With `has_key`, message 1 supersedes message 0 and has to wait while that one is in flight.
    """

    sends: tuple[tuple[int, ...], ...]
    handles: tuple[int, ...]
    has_key: bool = False
    breaks: int = 0
    deaths: int = 0
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        return World(0, (Producer(),) * len(self.sends), (Worker(),) * len(self.handles), self.breaks, self.deaths)

    def canonical(self, state: World) -> World:
        if len(set(self.handles)) > 1:
            return state
        if len(state.workers) > 1 and state.workers[1] < state.workers[0]:
            state = state._replace(workers=state.workers[::-1])
        if self.sends == ((0,), (1,)):
            # Producers and their messages, too, differ only in their names.
            swapped = _swapped(state)
            return min(state, swapped)
        return state

    def fault(self, state: World) -> str:
        """A message that can be claimed while all who could claim it sleep and nothing is on its way to wake them."""
        if not state.due or any(producer.at == "visible" and producer.rings for producer in state.producers):
            return ""
        if any(worker.at == "disarmed" or worker.asks for worker in state.workers):
            return ""
        claimed = _union(worker.locked for worker in state.workers) | self._waiting(state)
        for message in _bits(state.due & ~claimed):
            if not any(
                handled >> message & 1 and _may_look(worker)
                for handled, worker in zip(self.handles, state.workers, strict=True)
            ):
                return f"message {message} waits, and everybody who handles it sleeps"
        return ""

    def is_settled(self, state: World) -> bool:
        return (
            not state.due
            and all(producer.done == len(sends) for producer, sends in zip(state.producers, self.sends, strict=True))
            and all(
                worker.at == "dead"
                or (worker.at == "sleeps" and worker.link == "up" and not (worker.wake or worker.rings or worker.held))
                for worker in state.workers
            )
        )

    def steps(self, state: World) -> Iterator[Step]:
        for index, producer in enumerate(state.producers):
            for label, following in self._produce(state, index, producer):
                yield f"producer {index + 1} {label}", following
        for index, worker in enumerate(state.workers):
            if worker.at != "dead":
                for label, following in self._live(state, index, worker):
                    yield f"worker {index + 1} {label}", following

    def _live(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        yield from self._work(state, index, worker)
        yield from self._listen(state, index, worker)
        yield from self._finish(state, index, worker)
        if state.deaths:
            dead = _with(state, index, Worker("dead", link="gone"))
            yield "is killed", dead._replace(deaths=state.deaths - 1)

    # --- producer -----------------------------------------------------------------------------------------------------

    def _produce(self, state: World, index: int, producer: Producer) -> Iterator[Step]:
        def now(**changes: object) -> World:
            changed = producer._replace(**changes)  # type: ignore[arg-type] # Each call names fields of a producer.
            return state._replace(producers=(*state.producers[:index], changed, *state.producers[index + 1 :]))

        done = Producer(producer.done + 1)
        match producer.at:
            case "idle" if producer.done < len(self.sends[index]):
                message = self.sends[index][producer.done]
                if any(worker.has_bell for worker in state.workers):
                    rings = Guard.RING not in self.without
                    yield f"enqueues message {message} and is to ring", now(at="open", rings=rings)
                else:
                    is_shared = Guard.HELD_TO_COMMIT not in self.without
                    yield f"enqueues message {message}, nobody sleeps", now(at="open", is_shared=is_shared)
            case "open":
                yield "rolls back", now(**done._asdict())
                if Guard.RELEASED_AFTER_VISIBLE in self.without and producer.is_shared:
                    yield "lets go of the bell before its commit is visible", now(is_shared=False)
                message = self.sends[index][producer.done]
                yield f"commits message {message}", now(at="visible")._replace(due=state.due | 1 << message)
            case "visible" if producer.rings:
                yield "rings", _notify(now(**done._asdict()), -1)
            case "visible":
                yield "lets go of the bell", now(**done._asdict())

    # --- worker -------------------------------------------------------------------------------------------------------

    def _work(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        match worker.at:
            case "looks":
                yield from self._look(state, index, worker)
            case "claims":
                yield from self._take(state, index, worker)
            case "takes":
                yield from self._commit_claim(state, index, worker)
            case "disarms" | "disarmed":
                yield from self._disarm(state, index, worker)
            case "arms" | "asks" | "unlocks":
                yield from self._arm(state, index, worker)
            case "pauses":
                yield "ends its short pause", _with(state, index, worker._replace(at="arms", wake=False))
            case "falls asleep":
                is_up = worker.link in ("up", "broken", "deaf")
                yield (
                    ("sleeps", _with(state, index, worker._replace(at="sleeps")))
                    if is_up
                    else ("sleeps for a second: it has no listener", _with(state, index, worker._replace(at="naps")))
                )
            case "sleeps" if worker.wake:
                yield "wakes", _with(state, index, worker._replace(at="looks"))
            case "naps":
                yield "wakes by itself", _with(state, index, worker._replace(at="looks"))

    def _look(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        seen = state.due & self.handles[index] & ~self._waiting(state)
        forgets = Guard.RINGS_KEPT_WHILE_ARMING in self.without if worker.answer else True
        wake = worker.wake and (not forgets or Guard.WAKE_CLEARED_FIRST in self.without)
        claiming = worker._replace(at="claims", seen=seen, wake=wake)
        yield f"begins a claim that sees {_names(seen)}", _with(state, index, claiming)

    def _take(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        taken = worker.seen & state.due & ~_union(other.locked for other in state.workers)
        if taken & self._waiting(state):
            yield from self._fail_claim(state, index, worker)
        elif taken:
            yield (
                f"locks message {_names(taken)}",
                _with(state, index, worker._replace(at="takes", seen=0, locked=taken)),
            )
        else:
            wake = worker.wake and (bool(worker.answer) or Guard.WAKE_CLEARED_FIRST not in self.without)
            after = {"": "arms", "armed": "falls asleep", "producers": "pauses"}[worker.answer]
            now = worker._replace(at=after, seen=0, answer="", wake=wake)
            yield "finds nothing", _with(state, index, now)

    def _commit_claim(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        yield from self._fail_claim(state, index, worker)
        held = 0
        if self.has_key:
            held = 0b10 if worker.locked & 0b10 else 0b01  # Both at once: the older one is superseded.
        after = "disarms" if worker.believes else "looks"
        now = worker._replace(at=after, locked=0, answer="", held=worker.held | held)
        if Guard.WAKE_CLEARED_FIRST in self.without:
            now = now._replace(wake=False)
        taken = _with(state, index, now)._replace(due=state.due & ~worker.locked)
        yield f"has claimed message {_names(worker.locked)}", taken

    def _fail_claim(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        now = worker._replace(at="looks", seen=0, locked=0, answer="")
        yield "has to begin its claim again", _with(state, index, now)

    def _disarm(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        if worker.link != "up":
            yield "cannot disarm", _with(state, index, self._lost(worker._replace(at="looks", believes=False)))
        elif worker.at == "disarms":
            now = worker._replace(at="disarmed", believes=False, has_bell=False)
            yield "gives up the bell", _with(state, index, now)
        else:
            after = _with(state, index, worker._replace(at="looks"))
            if Guard.DISARM_ANNOUNCED in self.without:
                yield "says nothing of it", after
            else:
                yield "tells the other sleepers", _notify(after, index)

    def _arm(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """The two tries of ARM are two steps, and so is the end of a shared lock that was only tried."""
        if worker.at == "arms" and worker.believes:
            yield "is still armed", _with(state, index, worker._replace(at="falls asleep"))
        elif worker.link not in ("up", "deaf"):
            lost = worker if worker.link == "gone" else self._lost(worker)
            yield "has no listener to arm with", _with(state, index, lost._replace(at="falls asleep"))
        elif worker.at == "arms":
            if _is_free(state):
                armed = self._after_arming(worker._replace(believes=True, has_bell=True), "armed")
                yield "arms the bell", _with(state, index, armed)
            else:
                yield "cannot have the bell alone", _with(state, index, worker._replace(at="asks"))
        elif worker.at == "asks" and not any(other.has_bell for other in state.workers):
            yield "can have the bell shared", _with(state, index, worker._replace(at="unlocks"))
        elif worker.at == "asks":
            yield "trusts in the bell of another", _with(state, index, self._after_arming(worker, "armed"))
        else:
            yield "knows that producers are under way", _with(state, index, self._after_arming(worker, "producers"))

    def _after_arming(self, worker: Worker, answer: str) -> Worker:
        if answer == "producers" and Guard.PRODUCERS_AWAITED in self.without:
            answer = "armed"
        if Guard.CLAIM_AFTER_ARMING in self.without:
            return worker._replace(at="falls asleep" if answer == "armed" else "pauses")
        return worker._replace(at="looks", answer=answer)

    # --- listener -----------------------------------------------------------------------------------------------------

    def _listen(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        # One thing at a time is done with the connection; what it does next comes after the answer is dealt with.
        is_asking = worker.at in ("asks", "unlocks", "disarmed") or (worker.at == "looks" and worker.answer != "")
        match worker.link:
            case "up" if worker.rings:
                yield "hears a ring", _with(state, index, worker._replace(rings=worker.rings - 1, wake=True))
            case "broken" | "lost" | "gone" if is_asking:
                pass
            case "broken":
                yield "notices that its listener is lost", _with(state, index, self._lost(worker))
            case "lost":
                yield "closes its listener", _with(state, index, worker._replace(link="gone", believes=False))
            case "gone":
                wake = worker.wake or Guard.LOOK_AFTER_RECONNECT not in self.without
                link = "deaf" if Guard.LISTEN_FIRST in self.without else "up"
                yield "has a listener again", _with(state, index, worker._replace(link=link, wake=wake))
            case "deaf":
                yield "listens", _with(state, index, worker._replace(link="up"))
        if worker.link in ("up", "deaf") and state.breaks:
            broken = _with(state, index, worker._replace(link="broken", rings=0, has_bell=False))
            yield "has its listener cut off, and the bell with it", broken._replace(breaks=state.breaks - 1)

    def _lost(self, worker: Worker) -> Worker:
        wake = worker.wake or Guard.LOOK_WHEN_LOST not in self.without
        return worker._replace(link="lost", wake=wake)

    # --- finish -------------------------------------------------------------------------------------------------------

    def _waiting(self, state: World) -> int:
        """Messages that no claim may take yet."""
        return 0b10 if self.has_key and any(worker.held & 0b01 for worker in state.workers) else 0

    def _finish(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """The finisher is a task of its own: it goes on whatever the main task does."""
        asks_first = Guard.SUCCESSORS_ASKED_LATE in self.without
        if worker.held and not worker.asks:
            if asks_first:
                now = worker._replace(asks=worker.held, wake=worker.wake or _has_successor(state, worker.held))
                yield "asks for successors", _with(state, index, now)
            else:
                asks = 0 if Guard.SUCCESSORS_ASKED_FOR in self.without else worker.held
                now = worker._replace(held=0, asks=asks)
                yield f"finishes message {_names(worker.held)}", _with(state, index, now)
        elif worker.asks and asks_first:
            yield f"finishes message {_names(worker.held)}", _with(state, index, worker._replace(held=0, asks=0))
        elif worker.asks:
            wake = worker.wake or _has_successor(state, worker.asks)
            yield "asks for successors", _with(state, index, worker._replace(asks=0, wake=wake))


# --- state ------------------------------------------------------------------------------------------------------------


def _bits(mask: int) -> Iterator[int]:
    return (bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def _swapped(state: World) -> World:
    """The same with the two producers and their messages exchanged."""
    workers = tuple(
        worker._replace(seen=_SWAPPED[worker.seen], locked=_SWAPPED[worker.locked]) for worker in state.workers
    )
    if len(workers) > 1 and workers[1] < workers[0]:
        workers = workers[::-1]
    return state._replace(due=_SWAPPED[state.due], producers=state.producers[::-1], workers=workers)


def _names(mask: int) -> str:
    return ", ".join(map(str, _bits(mask))) or "nothing"


def _union(masks: Iterator[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result


def _with(state: World, index: int, worker: Worker) -> World:
    return state._replace(workers=(*state.workers[:index], worker, *state.workers[index + 1 :]))


def _notify(state: World, sender: int) -> World:
    """A ring is on its way to every session that listens, but for what a session says to itself."""
    return state._replace(
        workers=tuple(
            worker._replace(rings=min(worker.rings + 1, 2)) if worker.link == "up" and index != sender else worker
            for index, worker in enumerate(state.workers)
        )
    )


def _is_free(state: World) -> bool:
    return not (
        any(producer.is_shared for producer in state.producers)
        or any(worker.has_bell or worker.at == "unlocks" for worker in state.workers)
    )


def _may_look(worker: Worker) -> bool:
    """Whether a worker is awake or something is on its way that wakes it."""
    if worker.at == "dead":
        return False
    return worker.at != "sleeps" or worker.wake or worker.rings > 0 or worker.link in ("broken", "lost", "gone")


def _has_successor(state: World, done: int) -> bool:
    return bool(done & 0b01 and state.due & 0b10)
