"""The model of the doorbell: enqueue, claim, ask for the locks, sleep, notify and release, with faults of listeners and
workers.

There is no periodic poll and nothing falls due, so a missed wake-up is lost. Uninterrupted code of the event loop is
one step. A commit is a step of its own, and so is each lock that a statement tries. A message is one bit of a mask.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Guard(enum.Enum):
    """Guards of the protocol that a model can leave out."""

    NOTIFY = "an enqueue notifies while a worker has the wake-up lock"
    HELD_TO_COMMIT = "an enqueue holds the lock shared until its commit is visible, and does not only test it"
    RELEASED_AFTER_VISIBLE = "PostgreSQL releases the shared lock after the commit is visible, not before"
    CONFIRMED = "a worker claims once more after it has got its watch"
    LISTEN_FIRST = "it listens before that claim"
    PRODUCERS_AWAITED = "a worker that met producers at the lock claims and asks again until they have ended"
    NEWS_KEPT_WHILE_CLAIMING = "a claim forgets the wake-ups from before it, not those during it"
    NEWS_KEPT_WHILE_ASKING = "an announcement that comes before the answer makes the worker ask again"
    RELEASE_ANNOUNCED = "a watch that ends is announced"
    HUSH_ANNOUNCED = "a watch that gives only the wake-up lock back announces it"
    FULL_RELEASES = "a worker without room releases its watch"
    LIMITED_RELEASES = "it does so too if its queue was limited when it last asked"
    WATCH_OF_TOPICS = "workers of other topics have a watch of their own"
    EVERY_WATCH_ANSWERS = "a watch answers notifications whether or not it has the wake-up lock itself"
    IDLE_LOOKS = "a worker that relies on another session looks now and then"
    LOOKS_ASK_DUE = "a look also asks for messages that are overdue"
    ACTS_TELL_ALL = "an act of an operator notifies both channels"
    POLL_WHEN_LOST = "a worker claims when its listener is lost"
    POLL_AFTER_RECONNECT = "a worker claims when its listener is back"
    SUCCESSORS_ASKED_FOR = "a worker that ends a message asks for its successors"
    SUCCESSORS_ASKED_LATE = "it asks for them after its commit, not before"
    SUCCESSORS_OF_OTHERS = "it notifies the other workers if only they handle them"


class Producer(NamedTuple):
    """The number of messages that are done; `notifies` and `is_shared` belong to the open transaction."""

    done: int = 0
    at: str = "idle"
    notifies: bool = False
    is_shared: bool = False


class Worker(NamedTuple):
    """A worker: the step of its loop, whether it wants to claim or is woken, its listener, its locks, and its messages.

    The locks of a worker end with its link, which is up, broken (not noticed yet) or lost (noticed). `standing` is what
    the worker knows of its locks, `watch` and `wake_up_lock` are what its session has. `inbox` are the notifications in
    transit: of a message or a successor (m, s), of the end of a watch (e), of a released wake-up lock (r) and of an act
    (a). `hears`: it listens on the channel of producers, and not only on that of idle workers. Its trip finishes the
    messages in flight if it `ends`.
    """

    at: str = "turns"
    wanted: bool = True
    wake: bool = False
    link: str = "up"
    inbox: str = ""
    standing: str = ""
    hears: bool = False
    watch: bool = False
    wake_up_lock: bool = False
    answer: str = ""
    is_overdue: bool = False
    locked: int = 0
    held: int = 0
    ends: bool = False
    asks: int = 0


class World(NamedTuple):
    """The complete state. `due` are the committed pending messages. `act`: the current step of the operator."""

    due: int
    producers: tuple[Producer, ...]
    workers: tuple[Worker, ...]
    breaks: int
    deaths: int
    freezes: int
    act: str


Step = tuple[str, World]
_HEARD = {
    "m": "of a message",
    "s": "of a successor",
    "e": "that a watch has ended",
    "r": "that a lock was released",
    "a": "of an act",
}
_SWAPPED = (0b00, 0b10, 0b01, 0b11)
_ASKS = ("tries", "tests", "asks", "answered", "listens")


@dataclass(frozen=True, slots=True)
class Doorbell:
    """The model of workers and producers.

    `sends` names the messages of each producer, one transaction each; `handles` is each worker's mask of messages.
    With `has_key`, message 1 supersedes message 0 and has to wait while message 0 is in flight. With `hushes`, a
    watch may give the wake-up lock back and poll. With `fills`, a worker may have no room after a claim. With `looks`,
    a worker that relies on another session looks now and then. With `pauses`, an operator pauses and resumes the queue.
    With `dies_claiming`, a worker may be killed between a claim and its commit. A frozen worker keeps its locks and
    does nothing more.
    """

    sends: tuple[tuple[int, ...], ...]
    handles: tuple[int, ...]
    has_key: bool = False
    hushes: bool = False
    fills: bool = False
    looks: bool = False
    pauses: bool = False
    breaks: int = 0
    deaths: int = 0
    dies_claiming: bool = False
    freezes: int = 0
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        return World(
            0,
            (Producer(),) * len(self.sends),
            (Worker(),) * len(self.handles),
            self.breaks,
            self.deaths,
            self.freezes,
            "may pause" if self.pauses else "",
        )

    def canonical(self, state: World) -> World:
        choices = [state]
        # The producers are interchangeable together with their messages and the workers of these.
        if self.sends == ((0,), (1,)) and self.handles == tuple(_SWAPPED[mask] for mask in reversed(self.handles)):
            choices.append(_swapped(state))
        if len(set(self.handles)) == 1:
            choices = [choice._replace(workers=tuple(sorted(choice.workers))) for choice in choices]
        return min(choices)

    def fault(self, state: World) -> str:
        """Return a claimable message whose workers with room all sleep while no worker is about to claim."""
        if not state.due or state.act in ("paused", "resumed"):
            return ""
        if any(producer.at == "visible" and producer.notifies for producer in state.producers):
            return ""
        if any(worker.at in ("released", "hushed") or worker.asks for worker in state.workers):
            return ""
        claimed = _union(worker.locked for worker in state.workers) | self._waiting(state)
        for message in _bits(state.due & ~claimed):
            able = [
                worker
                for handled, worker in zip(self.handles, state.workers, strict=True)
                if handled >> message & 1 and worker.at != "full"
            ]
            if able and not any(self._may_claim(worker) for worker in able):
                return f"message {message} waits, and all workers that handle it are idle"
        return ""

    def _may_claim(self, worker: Worker) -> bool:
        """Return whether a worker is awake, or a look or a notification in transit will wake it."""
        if worker.at in ("dead", "frozen"):
            return False
        if worker.at != "sleeps" or worker.link != "up":
            return True
        return worker.wanted or worker.wake or bool(worker.inbox) or self._looks(worker)

    def _looks(self, worker: Worker) -> bool:
        return self.looks and worker.standing in ("relies", "watch") and Guard.IDLE_LOOKS not in self.without

    def is_settled(self, state: World) -> bool:
        return (
            not state.due
            and state.act in ("", "resumed, told")
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
        yield from self._act(state)

    def _live(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        for label, after in self._work(state, index, worker):
            yield label, after if isinstance(after, World) else _with(state, index, after)
        yield from self._listen(state, index, worker)
        if state.deaths and (self.dies_claiming or worker.at not in ("turns", "claims")):
            dead = _with(state, index, Worker("dead", wanted=False, link="lost"))
            yield "is killed", dead._replace(deaths=state.deaths - 1)
        if state.freezes and worker.at in ("sleeps", "pauses"):
            frozen = _with(state, index, worker._replace(at="frozen", inbox="", wanted=False, wake=False))
            yield "freezes", frozen._replace(freezes=state.freezes - 1)

    # --- producer and operator ----------------------------------------------------------------------------------------

    def _produce(self, state: World, index: int, producer: Producer) -> Iterator[Step]:
        def now(**changes: object) -> World:
            changed = producer._replace(**changes)  # type: ignore[arg-type] # Each call names fields of a producer.
            return state._replace(producers=(*state.producers[:index], changed, *state.producers[index + 1 :]))

        done = Producer(producer.done + 1)
        match producer.at:
            case "idle" if producer.done < len(self.sends[index]):
                message = self.sends[index][producer.done]
                if any(worker.wake_up_lock for worker in state.workers):
                    notifies = Guard.NOTIFY not in self.without
                    yield f"enqueues message {message} and is to notify", now(at="open", notifies=notifies)
                else:
                    is_shared = Guard.HELD_TO_COMMIT not in self.without
                    yield f"enqueues message {message}, no worker is idle", now(at="open", is_shared=is_shared)
            case "open":
                yield "rolls back", now(**done._asdict())
                if Guard.RELEASED_AFTER_VISIBLE in self.without and producer.is_shared:
                    yield "releases the lock before its commit is visible", now(is_shared=False)
                message = self.sends[index][producer.done]
                yield f"commits message {message}", now(at="visible")._replace(due=state.due | 1 << message)
            case "visible" if producer.notifies:
                yield "notifies", _notify(now(**done._asdict()), -1, "m")
            case "visible":
                yield "releases the lock", now(**done._asdict())

    def _act(self, state: World) -> Iterator[Step]:
        """Pause and resume the queue: a message that workers have passed over becomes claimable."""
        match state.act:
            case "may pause":
                yield "the queue is paused", state._replace(act="paused")
            case "paused":
                yield "the queue is resumed", state._replace(act="resumed")
            case "resumed":
                told = state._replace(act="resumed, told")
                yield "the operator notifies", _notify(told, -1, "a", to_all=Guard.ACTS_TELL_ALL not in self.without)

    # --- worker -------------------------------------------------------------------------------------------------------

    def _work(  # noqa: C901 - one clause for each place
        self, state: World, index: int, worker: Worker
    ) -> Iterator[tuple[str, World | Worker]]:
        match worker.at:
            case "turns":
                yield from self._turn(state, index, worker._replace(wake=False))
            case "claims":
                yield from self._commit_claim(state, index, worker)
            case "finished":
                yield from self._ask_for_successors(state, index, worker)
            case "full":
                yield "has room again", worker._replace(at="turns")
            case "releases" | "released" | "hushes" | "hushed":
                yield from self._release(state, index, worker)
            case "tries" | "tests" | "asks" | "answered" | "listens":
                yield from self._ask(state, index, worker)
            case "pauses":
                yield "ends its short pause", worker._replace(at="turns", wanted=True)
            case "naps":
                yield "wakes by itself", worker._replace(at="turns", wanted=True)
            case "sleeps":
                if worker.wanted or worker.wake:
                    yield "wakes", worker._replace(at="turns")
                elif self._looks(worker):
                    yield "looks", worker._replace(at="turns")
                elif worker.held:
                    yield "wakes as an attempt ends", worker._replace(at="turns")

    def _turn(self, state: World, index: int, worker: Worker) -> Iterator[tuple[str, Worker]]:
        """Begin a trip, which finishes and claims in one transaction, or else ask for the locks."""
        for ends in (False, True) if worker.held else (False,):
            if worker.wanted or ends:
                is_early = ends and Guard.SUCCESSORS_ASKED_LATE in self.without and _has_successor(state, worker.held)
                seen = self._claimable(state, index, ends=ends) if worker.wanted else 0
                kept = Guard.NEWS_KEPT_WHILE_CLAIMING in self.without
                now = worker._replace(at="claims", wanted=kept or is_early, locked=seen, ends=ends)
                how = f"to finish {_names(worker.held)} and a claim" if ends else "a claim"
                yield f"begins {how} that sees {_names(seen)}", now
        if worker.wanted:
            return
        if self.hushes and worker.standing == "producers":
            yield "polls on at a high rate", worker._replace(wanted=True)
        yield from self._hold(state, index, worker)

    def _claimable(self, state: World, index: int, *, ends: bool = False) -> int:
        """Return what a claim sees and locks. Its finish, in the same transaction, comes first."""
        if state.act == "paused":
            return 0
        others = [other for number, other in enumerate(state.workers) if number != index]
        waiting = 0 if ends else self._waiting(state)
        return state.due & self.handles[index] & ~waiting & ~_union(other.locked for other in others)

    def _commit_claim(self, state: World, index: int, worker: Worker) -> Iterator[tuple[str, World | Worker]]:
        if worker.locked or worker.ends:
            yield "has to begin its trip again", worker._replace(at="turns", locked=0, ends=False, wanted=True)
        held = worker.held
        if worker.ends:
            held = 0
        if self.has_key and worker.locked:
            held |= 0b10 if worker.locked & 0b10 else 0b01  # Both at once: the older message is superseded.
        wanted = worker.wanted and Guard.NEWS_KEPT_WHILE_CLAIMING not in self.without
        now = worker._replace(at="turns", wanted=wanted, locked=0, ends=False, held=held)
        if worker.ends and Guard.SUCCESSORS_ASKED_FOR not in self.without:
            now = now._replace(at="finished", asks=worker.held)
        taken = state._replace(due=state.due & ~worker.locked)
        label = f"has claimed {_names(worker.locked)}"
        yield label, _with(taken, index, now)
        if worker.ends:
            return
        if self.hushes and worker.standing == "holds" and worker.locked:
            hushing = now._replace(at="hushes", standing="producers")
            yield f"{label}, and messages come fast", _with(taken, index, hushing)
        if self.fills:  # Perhaps with messages of other queues.
            yield f"{label}, and is full", _with(taken, index, self._fill(now))

    def _fill(self, worker: Worker) -> Worker:
        if Guard.FULL_RELEASES in self.without:
            return worker._replace(at="full")
        has_locks = worker.standing in ("holds", "watch", "producers")
        has_locks |= worker.standing == "limited" and Guard.LIMITED_RELEASES not in self.without
        return worker._replace(at="releases" if has_locks else "full", standing="")

    def _release(self, state: World, index: int, worker: Worker) -> Iterator[tuple[str, World | Worker]]:
        """Release all locks, or only the wake-up lock. The notification comes with the commit."""
        if worker.link != "up":
            yield "has no locks to release", self._lost(worker)._replace(at="turns")
            return
        match worker.at:
            case "releases":
                yield "releases its locks", worker._replace(at="released", watch=False, wake_up_lock=False)
            case "hushes":
                yield "releases its lock and stays on watch", worker._replace(at="hushed", wake_up_lock=False)
            case "released":
                now = _with(state, index, worker._replace(at="full"))
                announced = Guard.RELEASE_ANNOUNCED not in self.without
                yield "announces its end", _notify(now, index, "e", to_all=True) if announced else now
            case _:
                now = _with(state, index, worker._replace(at="turns"))
                announced = Guard.HUSH_ANNOUNCED not in self.without
                yield "announces that it polls", _notify(now, index, "r", to_all=True) if announced else now

    # --- the locks ----------------------------------------------------------------------------------------------------

    def _hold(self, state: World, index: int, worker: Worker) -> Iterator[tuple[str, Worker]]:
        """hold.sql tries several locks in turn. Each try is a step."""
        if worker.link == "lost":
            yield "sleeps for a second: it has no listener", worker._replace(at="naps")
        elif worker.standing == "holds":
            yield "sleeps", worker._replace(at="sleeps" if worker.hears else "listens")
        elif worker.link == "broken":
            yield "has no listener to ask", self._lost(worker)._replace(at="turns")
        elif state.act == "paused":
            yield "finds its queue limited", worker._replace(at="answered", answer="limited")
        elif self._has_other_watch(state, index):
            yield "finds another one on watch", worker._replace(at="asks", answer="relies")
        else:
            yield "is on watch", worker._replace(at="tries", watch=True)

    def _ask(self, state: World, index: int, worker: Worker) -> Iterator[tuple[str, Worker]]:
        if worker.link != "up":
            yield "has no listener to ask", self._lost(worker)._replace(at="turns")
            return
        match worker.at:
            case "tries" if _is_free(state):
                yield "acquires the lock", worker._replace(at="answered", answer="holds", wake_up_lock=True)
            case "tries":
                yield "cannot have the lock alone", worker._replace(at="tests")
            case "tests" if any(other.wake_up_lock for other in state.workers):
                yield "finds that another one has the lock", worker._replace(at="asks", answer="watch")
            case "tests":
                yield "finds that producers share the lock", worker._replace(at="answered", answer="producers")
            case "asks":
                is_overdue = bool(self._claimable(state, index)) and Guard.LOOKS_ASK_DUE not in self.without
                yield "asks what is due", worker._replace(at="answered", is_overdue=is_overdue)
            case "answered":
                yield "has the answer", self._after_answer(worker)
            case _:
                yield "listens", self._rested(worker._replace(hears=worker.standing != "relies"))

    def _after_answer(self, worker: Worker) -> Worker:
        standing = worker.answer
        is_new = standing != worker.standing and standing in ("holds", "watch")
        if standing == "producers" and Guard.PRODUCERS_AWAITED in self.without:
            standing, is_new = "holds", True
        claims = (is_new and Guard.CONFIRMED not in self.without) or worker.is_overdue
        now = worker._replace(standing=standing, answer="", is_overdue=False, wanted=worker.wanted or claims)
        if now.hears == (standing != "relies") or (claims and Guard.LISTEN_FIRST in self.without):
            return self._rested(now)
        return now._replace(at="listens")

    def _rested(self, worker: Worker) -> Worker:
        if worker.standing == "producers":
            return worker._replace(at="pauses", wanted=True)
        return worker._replace(at="turns" if worker.wanted else "sleeps")

    def _has_other_watch(self, state: World, index: int) -> bool:
        return any(
            other.watch
            for number, other in enumerate(state.workers)
            if number != index
            and (self.handles[number] == self.handles[index] or Guard.WATCH_OF_TOPICS in self.without)
        )

    # --- listener -----------------------------------------------------------------------------------------------------

    def _listen(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        for notification in worker.inbox if worker.link == "up" else "":
            heard = self._after_hearing(worker, notification)._replace(inbox=worker.inbox.replace(notification, ""))
            yield f"hears {_HEARD[notification]}", _with(state, index, heard)
        # The connection runs one statement at a time; the next one begins after the answer is processed.
        if worker.at not in (*_ASKS, "releases", "released", "hushes", "hushed"):
            if worker.link == "broken":
                yield "notices that its listener is lost", _with(state, index, self._lost(worker))
            elif worker.link == "lost":
                wanted = worker.wanted or Guard.POLL_AFTER_RECONNECT not in self.without
                yield "has a listener again", _with(state, index, worker._replace(link="up", wanted=wanted))
        if worker.link == "up" and state.breaks:
            broken = worker._replace(link="broken", inbox="", watch=False, wake_up_lock=False, hears=False)
            cut = _with(state, index, broken)._replace(breaks=state.breaks - 1)
            yield "has its listener cut off, and its locks with it", cut

    def _after_hearing(self, worker: Worker, notification: str) -> Worker:
        match notification:
            case "m":
                answers = worker.standing in ("", "holds", "producers", "limited") or (
                    worker.standing == "watch" and Guard.EVERY_WATCH_ANSWERS not in self.without
                )
                return worker._replace(wanted=worker.wanted or answers)
            case "a" | "s":
                return worker._replace(wanted=True)
            case _:
                asks = worker.at in _ASKS
                wakes = worker.standing == "watch" or (worker.standing == "relies" and notification == "e")
                wakes |= asks and Guard.NEWS_KEPT_WHILE_ASKING not in self.without
                # A worker that is awake asks before it sleeps.
                return worker._replace(wake=worker.wake or (wakes and (asks or worker.at == "sleeps")))

    def _lost(self, worker: Worker) -> Worker:
        wanted = worker.wanted or Guard.POLL_WHEN_LOST not in self.without
        return worker._replace(link="lost", wanted=wanted, standing="", answer="", is_overdue=False, hears=False)

    # --- successors ---------------------------------------------------------------------------------------------------

    def _waiting(self, state: World) -> int:
        """Return messages that no claim may take yet."""
        return 0b10 if self.has_key and any(worker.held & 0b01 for worker in state.workers) else 0

    def _ask_for_successors(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        is_early = Guard.SUCCESSORS_ASKED_LATE in self.without
        is_found = _has_successor(state, worker.asks) and not is_early
        is_own = bool(self.handles[index] & 0b10)
        now = worker._replace(at="turns", asks=0, wanted=worker.wanted or (is_found and is_own))
        following = _with(state, index, now)
        if is_found and not is_own and Guard.SUCCESSORS_OF_OTHERS not in self.without:
            following = _notify(following, index, "s")
        yield "asks for successors", following


# --- state ------------------------------------------------------------------------------------------------------------


def _bits(mask: int) -> Iterator[int]:
    return (bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def _swapped(state: World) -> World:
    """Return the state with the two producers, their messages and the workers of these exchanged."""
    workers = tuple(worker._replace(locked=_SWAPPED[worker.locked]) for worker in reversed(state.workers))
    return state._replace(due=_SWAPPED[state.due], producers=state.producers[::-1], workers=workers)


def _names(mask: int) -> str:
    return " and ".join(f"message {bit}" for bit in _bits(mask)) or "nothing"


def _union(masks: Iterator[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result


def _with(state: World, index: int, worker: Worker) -> World:
    return state._replace(workers=(*state.workers[:index], worker, *state.workers[index + 1 :]))


def _notify(state: World, sender: int, notification: str, *, to_all: bool = False) -> World:
    """Send a notification to the sessions that listen on its channel, but not to the sender.

    A repeated one changes nothing. Their order does not matter, so the model delivers them in any.
    """
    return state._replace(
        workers=tuple(
            worker._replace(inbox="".join(sorted({*worker.inbox, notification})))
            if worker.link == "up" and worker.at != "frozen" and index != sender and (to_all or worker.hears)
            else worker
            for index, worker in enumerate(state.workers)
        )
    )


def _is_free(state: World) -> bool:
    """Return whether the wake-up lock can be had alone. A worker that has tested it shares it until its answer."""
    return not (
        any(producer.is_shared for producer in state.producers)
        or any(worker.wake_up_lock or worker.answer == "producers" for worker in state.workers)
    )


def _is_at_rest(worker: Worker) -> bool:
    is_pending = worker.wanted or worker.wake or worker.inbox or worker.held
    return worker.at == "sleeps" and worker.link == "up" and not is_pending


def _has_successor(state: World, done: int) -> bool:
    return bool(done & 0b01 and state.due & 0b10)
