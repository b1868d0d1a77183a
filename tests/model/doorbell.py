"""The model of the doorbell: enqueue, arm, claim, sleep, ring, disarm, poll; with listeners that break, and workers
that die or hang.

There is no periodic poll and nothing falls due, so a missed wake-up is lost. Uninterrupted code of the event loop is
one step. A statement is two steps: its effect on locks and its commit. A message is one bit of a mask.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Guard(enum.Enum):
    """Guards of the protocol that a model can leave out."""

    RING = "an enqueue that meets an armed bell rings"
    HELD_TO_COMMIT = "an enqueue holds the bell shared until its commit is visible, and does not only test it"
    RELEASED_AFTER_VISIBLE = "PostgreSQL releases the shared bell after the commit is visible, not before"
    CLAIM_AFTER_ARMING = "a worker claims once more after arming"
    PRODUCERS_AWAITED = "a worker that met producers at the bell looks again until they have ended"
    WAKE_CLEARED_FIRST = "a worker clears earlier rings before its claim, not after it"
    RINGS_KEPT_WHILE_ARMING = "the next claim does not clear a ring that arrives while the worker arms"
    DISARM_ANNOUNCED = "a watch that ends is announced"
    LOWERED_ANNOUNCED = "a bell that is lowered is announced"
    NEWS_KEPT_WHILE_ASKING = "an announcement that comes before the answer makes the worker ask again"
    FULL_STANDS_DOWN = "a worker without room gives up its watch"
    WATCH_OF_TOPICS = "workers of other topics have a watch of their own"
    RING_FOR_EVERY_WATCH = "a watch answers rings whether or not it has the bell itself"
    DEPUTY_CHECKS = "a deputy looks some time after each ring"
    DEPUTY_POLLS = "a deputy looks now and then while the bell is not armed"
    LISTEN_FIRST = "a listener that reconnects listens before its worker looks"
    LOOK_AFTER_RECONNECT = "a worker looks when its listener is back"
    LOOK_WHEN_LOST = "a worker looks when its listener is lost"
    SUCCESSORS_ASKED_FOR = "a worker that ends a message asks for its successors"
    SUCCESSORS_ASKED_LATE = "it asks for them after its commit, not before"


class Producer(NamedTuple):
    """The number of messages that are done; `rings` and `is_shared` belong to the open transaction."""

    done: int = 0
    at: str = "idle"
    rings: bool = False
    is_shared: bool = False


class Worker(NamedTuple):
    """A worker: the step of its main task, its wake-up event, its listener, its locks, its claim and messages in
    flight.

    The locks of a worker end with its link. The link is up, broken (not noticed yet), lost (noticed), gone (closed)
    or deaf (connected, but not listening yet). `knows_watch` and `news` belong to the answer to its query for locks.
    `rings`, `calls` and `lowerings` are notifications in transit: from producers, to all workers, and for watches
    and deputies.
    """

    at: str = "looks"
    wake: bool = False
    link: str = "up"
    rings: int = 0
    calls: int = 0
    lowerings: int = 0
    bell: bool = False
    watch: bool = False
    deputy: bool = False
    knows_watch: bool = False
    trusts: bool = False
    is_polled: bool = False
    news: bool = False
    checks: bool = False
    answer: str = ""
    seen: int = 0
    locked: int = 0
    held: int = 0
    asks: int = 0


class World(NamedTuple):
    """The complete state. `due` are the committed pending messages."""

    due: int
    producers: tuple[Producer, ...]
    workers: tuple[Worker, ...]
    breaks: int
    deaths: int
    freezes: int


Step = tuple[str, World]
_SWAPPED = (0b00, 0b10, 0b01, 0b11)


@dataclass(frozen=True, slots=True)
class Doorbell:
    """The model of workers and producers.

    `sends` names the messages of each producer, one transaction each; `handles` is each worker's mask of messages.
    With `has_key`, message 1 supersedes message 0 and has to wait while message 0 is in flight. With `polls`, a
    worker on watch may poll instead of sleeping. With `fills`, it may have no room after a claim. A frozen worker
    keeps its locks and does nothing more.
    """

    sends: tuple[tuple[int, ...], ...]
    handles: tuple[int, ...]
    has_key: bool = False
    polls: bool = False
    fills: bool = False
    breaks: int = 0
    deaths: int = 0
    freezes: int = 0
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        workers = (Worker(),) * len(self.handles)
        return World(0, (Producer(),) * len(self.sends), workers, self.breaks, self.deaths, self.freezes)

    def canonical(self, state: World) -> World:
        if len(set(self.handles)) > 1:
            return state
        if len(state.workers) > 1 and state.workers[1] < state.workers[0]:
            state = state._replace(workers=state.workers[::-1])
        if self.sends == ((0,), (1,)):
            # Producers and their messages are also interchangeable.
            swapped = _swapped(state)
            return min(state, swapped)
        return state

    def fault(self, state: World) -> str:
        """Return a claimable message whose workers with room all sleep while none is about to look."""
        if not state.due or any(producer.at == "visible" and producer.rings for producer in state.producers):
            return ""
        if any(worker.at in ("disarmed", "lowered") or worker.asks for worker in state.workers):
            return ""
        claimed = _union(worker.locked for worker in state.workers) | self._waiting(state)
        for message in _bits(state.due & ~claimed):
            able = [
                worker
                for handled, worker in zip(self.handles, state.workers, strict=True)
                if handled >> message & 1 and worker.at != "full"
            ]
            if able and not any(_may_look(worker) for worker in able):
                return f"message {message} waits, and all workers that handle it sleep"
        return ""

    def is_settled(self, state: World) -> bool:
        return (
            not state.due
            and all(producer.done == len(sends) for producer, sends in zip(state.producers, self.sends, strict=True))
            and all(worker.at in ("dead", "frozen") or _is_at_rest(worker) for worker in state.workers)
        )

    def steps(self, state: World) -> Iterator[Step]:
        for index, producer in enumerate(state.producers):
            for label, following in self._produce(state, index, producer):
                yield f"producer {index + 1} {label}", following
        for index, worker in enumerate(state.workers):
            if worker.at not in ("dead", "frozen"):
                for label, following in self._live(state, index, worker):
                    yield f"worker {index + 1} {label}", following

    def _live(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        yield from self._work(state, index, worker)
        yield from self._listen(state, index, worker)
        yield from self._finish(state, index, worker)
        if state.deaths:
            dead = _with(state, index, Worker("dead", link="gone"))
            yield "is killed", dead._replace(deaths=state.deaths - 1)
        if state.freezes and worker.at in ("sleeps", "polls", "pauses"):
            frozen = _with(state, index, worker._replace(at="frozen", rings=0, calls=0, lowerings=0, wake=False))
            yield "freezes", frozen._replace(freezes=state.freezes - 1)

    # --- producer -----------------------------------------------------------------------------------------------------

    def _produce(self, state: World, index: int, producer: Producer) -> Iterator[Step]:
        def now(**changes: object) -> World:
            changed = producer._replace(**changes)  # type: ignore[arg-type] # Each call names fields of a producer.
            return state._replace(producers=(*state.producers[:index], changed, *state.producers[index + 1 :]))

        done = Producer(producer.done + 1)
        match producer.at:
            case "idle" if producer.done < len(self.sends[index]):
                message = self.sends[index][producer.done]
                if any(_has_bell(worker) for worker in state.workers):
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
                yield "rings", _notify(now(**done._asdict()), -1, "rings")
            case "visible":
                yield "lets go of the bell", now(**done._asdict())

    # --- worker -------------------------------------------------------------------------------------------------------

    def _work(  # noqa: C901 - one clause for each place
        self, state: World, index: int, worker: Worker
    ) -> Iterator[Step]:
        match worker.at:
            case "looks":
                yield from self._look(state, index, worker)
            case "claims":
                yield from self._take(state, index, worker)
            case "takes":
                yield from self._commit_claim(state, index, worker)
            case "full":
                yield "has room again", _with(state, index, worker._replace(at="looks"))
            case "disarms" | "disarmed":
                yield from self._disarm(state, index, worker)
            case "lowers" | "lowered":
                yield from self._lower(state, index, worker)
            case "arms":
                yield from self._poll(state, index, worker)
                yield from self._arm(state, index, worker)
            case "tries" | "asks" | "unlocks" | "told":
                yield from self._ask(state, index, worker)
            case "polls":
                yield "polls", _with(state, index, worker._replace(at="looks"))
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
            case "sleeps" if worker.is_polled:
                yield "looks while the watch polls", _with(state, index, worker._replace(at="looks"))
            case "sleeps" if self.polls and worker.knows_watch:
                yield "wakes for another message", _with(state, index, worker._replace(at="looks"))
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
            held = 0b10 if worker.locked & 0b10 else 0b01  # Both at once: the older message is superseded.
        now = worker._replace(at="looks", locked=0, answer="", held=worker.held | held)
        if Guard.WAKE_CLEARED_FIRST in self.without:
            now = now._replace(wake=False)
        label = f"has claimed message {_names(worker.locked)}"
        taken = state._replace(due=state.due & ~worker.locked)
        yield label, _with(taken, index, now)
        is_on_duty = worker.bell or worker.watch or worker.deputy
        if is_on_duty:
            yield f"{label}, and more may wait", _with(taken, index, now._replace(at="disarms"))
        if self.fills and (not is_on_duty or Guard.FULL_STANDS_DOWN in self.without):
            yield f"{label}, and is full", _with(taken, index, now._replace(at="full"))

    def _fail_claim(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        now = worker._replace(at="looks", seen=0, locked=0, answer="")
        yield "has to begin its claim again", _with(state, index, now)

    def _disarm(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        if worker.link != "up":
            yield "cannot disarm", _with(state, index, self._lost(_without_locks(worker)._replace(at="looks")))
        elif worker.at == "disarms":
            yield "gives up its watch", _with(state, index, _without_locks(worker)._replace(at="disarmed"))
        else:
            for after, how in (("looks", ""), ("full", ", and is full"))[: 1 + self.fills]:
                now = _with(state, index, worker._replace(at=after))
                if Guard.DISARM_ANNOUNCED in self.without:
                    yield f"says nothing of it{how}", now
                else:
                    yield f"tells the other sleepers{how}", _notify(now, index, "calls")

    def _poll(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Let a worker on watch poll instead of sleeping, at any time."""
        if not self.polls:
            return
        if worker.knows_watch and worker.bell:
            yield "is about to poll", _with(state, index, worker._replace(at="lowers"))
        elif worker.knows_watch:
            yield "polls on", _with(state, index, worker._replace(at="polls"))

    def _lower(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        if worker.link != "up":
            yield "cannot lower its bell", _with(state, index, self._lost(worker._replace(at="polls", bell=False)))
        elif worker.at == "lowers":
            yield "lowers its bell", _with(state, index, worker._replace(at="lowered", bell=False))
        else:
            now = _with(state, index, worker._replace(at="polls"))
            announced = Guard.LOWERED_ANNOUNCED not in self.without
            yield "tells of it", _notify(now, index, "lowerings") if announced else now

    def _arm(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """ARM tries several locks in turn. Each try is a step, and so is the answer."""
        if worker.bell or worker.trusts:
            yield "is still armed", _with(state, index, worker._replace(at="falls asleep"))
        elif worker.link not in ("up", "deaf"):
            lost = worker if worker.link == "gone" else self._lost(worker)
            yield "has no listener to arm with", _with(state, index, lost._replace(at="falls asleep"))
        elif worker.watch or not self._has_other_watch(state, index):
            now = worker._replace(at="tries", watch=True, deputy=False, is_polled=False, news=False)
            yield "is on watch", _with(state, index, now)
        else:
            is_first = not any(_is_up(other) and other.deputy for other in state.workers)
            deputy = worker.deputy or (self.freezes > 0 and is_first)
            is_armed = any(_has_bell(other) for other in state.workers)
            is_polled = deputy and not is_armed and Guard.DEPUTY_POLLS not in self.without
            now = worker._replace(at="told", deputy=deputy, is_polled=is_polled, news=False, answer="trust")
            yield "finds another one on watch", _with(state, index, now)

    def _ask(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        if worker.link not in ("up", "deaf"):
            lost = self._lost(_without_locks(worker)._replace(at="falls asleep", answer=""))
            yield "has no listener to arm with", _with(state, index, lost)
            return
        match worker.at:
            case "tries" if _is_free(state):
                now = worker._replace(at="told", bell=True, answer="armed")
                yield "arms the bell", _with(state, index, now)
            case "tries":
                yield "cannot have the bell alone", _with(state, index, worker._replace(at="asks"))
            case "asks" if any(_has_bell(other) for other in state.workers):
                now = worker._replace(at="told", answer="trust")
                yield "finds that another one has the bell", _with(state, index, now)
            case "asks":
                yield "can have the bell shared", _with(state, index, worker._replace(at="unlocks"))
            case "unlocks":
                now = worker._replace(at="told", answer="producers")
                yield "knows that producers are under way", _with(state, index, now)
            case "told":
                yield "has the answer", _with(state, index, self._after_arming(worker))

    def _after_arming(self, worker: Worker) -> Worker:
        has_news = worker.news and Guard.NEWS_KEPT_WHILE_ASKING not in self.without
        trusts = worker.answer == "trust" and not worker.is_polled and not has_news
        answer = "producers" if worker.answer == "producers" else "armed"
        if answer == "producers" and Guard.PRODUCERS_AWAITED in self.without:
            answer = "armed"
        told = worker._replace(
            knows_watch=worker.watch, trusts=trusts, wake=worker.wake or has_news, news=False, answer=answer
        )
        if Guard.CLAIM_AFTER_ARMING in self.without:
            return told._replace(at="falls asleep" if answer == "armed" else "pauses", answer="")
        return told._replace(at="looks")

    def _has_other_watch(self, state: World, index: int) -> bool:
        return any(
            _is_up(other) and other.watch
            for number, other in enumerate(state.workers)
            if number != index
            and (self.handles[number] == self.handles[index] or Guard.WATCH_OF_TOPICS in self.without)
        )

    # --- listener -----------------------------------------------------------------------------------------------------

    def _listen(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        # The connection runs one statement at a time; the next one begins after the answer is processed.
        is_asking = worker.at in ("tries", "asks", "unlocks", "told", "disarmed", "lowered") or (
            worker.at == "looks" and worker.answer != ""
        )
        if worker.link == "up":
            yield from self._hear(state, index, worker)
        match worker.link:
            case "broken" | "lost" | "gone" if is_asking:
                pass
            case "broken":
                yield "notices that its listener is lost", _with(state, index, self._lost(worker))
            case "lost":
                yield "closes its listener", _with(state, index, _without_locks(worker)._replace(link="gone"))
            case "gone":
                wake = worker.wake or Guard.LOOK_AFTER_RECONNECT not in self.without
                link = "deaf" if Guard.LISTEN_FIRST in self.without else "up"
                yield "has a listener again", _with(state, index, worker._replace(link=link, wake=wake))
            case "deaf":
                yield "listens", _with(state, index, worker._replace(link="up"))
        if worker.link in ("up", "deaf") and state.breaks:
            broken = _with(state, index, worker._replace(link="broken", rings=0, calls=0, lowerings=0))
            yield "has its listener cut off, and the bell with it", broken._replace(breaks=state.breaks - 1)

    def _hear(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Deliver notifications between any two steps, also before the answer to the worker's query."""
        answers = worker.knows_watch and (worker.bell or Guard.RING_FOR_EVERY_WATCH not in self.without)
        is_asking = worker.at in ("tries", "asks", "unlocks", "told")
        if worker.rings:
            heard = worker._replace(rings=worker.rings - 1)
            if answers:
                heard = heard._replace(wake=True)
            elif worker.deputy and Guard.DEPUTY_CHECKS not in self.without:
                heard = heard._replace(checks=True)
            yield "hears a ring", _with(state, index, heard)
        if worker.calls:
            heard = worker._replace(calls=0, trusts=False, wake=True, news=is_asking)
            yield "hears that a watch has ended", _with(state, index, heard)
        if worker.lowerings:
            heard = worker._replace(lowerings=0, news=worker.news or is_asking)
            if worker.knows_watch or worker.deputy:
                heard = heard._replace(trusts=False)
            if worker.knows_watch:
                heard = heard._replace(wake=True)
            elif worker.deputy and Guard.DEPUTY_CHECKS not in self.without:
                heard = heard._replace(checks=True)
            yield "hears that a bell was lowered", _with(state, index, heard)
        if worker.checks:
            yield "looks after the watch", _with(state, index, worker._replace(checks=False, wake=True))

    def _lost(self, worker: Worker) -> Worker:
        wake = worker.wake or Guard.LOOK_WHEN_LOST not in self.without
        return worker._replace(link="lost", wake=wake)

    # --- finish -------------------------------------------------------------------------------------------------------

    def _waiting(self, state: World) -> int:
        """Return messages that no claim may take yet."""
        return 0b10 if self.has_key and any(worker.held & 0b01 for worker in state.workers) else 0

    def _finish(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Run the finisher, a separate task that continues whatever the main task does."""
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
    """Return the state with the two producers and their messages exchanged."""
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


def _notify(state: World, sender: int, kind: str) -> World:
    """Send a notification to every listening session, but not to the sender."""
    limit = 2 if kind == "rings" else 1
    return state._replace(
        workers=tuple(
            worker._replace(**{kind: min(getattr(worker, kind) + 1, limit)})
            if worker.link == "up" and worker.at != "frozen" and index != sender
            else worker
            for index, worker in enumerate(state.workers)
        )
    )


def _without_locks(worker: Worker) -> Worker:
    return worker._replace(
        bell=False, watch=False, deputy=False, knows_watch=False, trusts=False, is_polled=False, checks=False
    )


def _is_up(worker: Worker) -> bool:
    return worker.link in ("up", "deaf")


def _has_bell(worker: Worker) -> bool:
    return worker.bell and _is_up(worker)


def _is_free(state: World) -> bool:
    return not (
        any(producer.is_shared for producer in state.producers)
        or any(_has_bell(worker) or worker.at == "unlocks" for worker in state.workers)
    )


def _is_at_rest(worker: Worker) -> bool:
    is_pending = worker.wake or worker.rings or worker.calls or worker.lowerings or worker.checks or worker.held
    return worker.at == "sleeps" and worker.link == "up" and not is_pending


def _may_look(worker: Worker) -> bool:
    """Return whether a worker is awake or a notification in transit will wake it."""
    if worker.at in ("dead", "frozen"):
        return False
    if worker.at != "sleeps" or worker.link in ("broken", "lost", "gone"):
        return True
    # Only its watch and its deputy react to a ring.
    heeds = worker.knows_watch or worker.deputy
    is_called = heeds and (worker.rings or worker.lowerings)
    return bool(worker.wake or worker.calls or worker.is_polled or worker.checks or is_called)


def _has_successor(state: World, done: int) -> bool:
    return bool(done & 0b01 and state.due & 0b10)
