"""The model of the doorbell: enqueue, acquire, claim, sleep, notify and release, with faults of listeners and workers.

There is no periodic poll and nothing falls due, so a missed wake-up is lost. Uninterrupted code of the event loop is
one step. A statement is two steps: its effect on locks and its commit. A message is one bit of a mask.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Guard(enum.Enum):
    """Guards of the protocol that a model can leave out."""

    NOTIFY = "an enqueue notifies while a worker has the wake-up lock"
    HELD_TO_COMMIT = "an enqueue holds the lock shared until its commit is visible, and does not only test it"
    RELEASED_AFTER_VISIBLE = "PostgreSQL releases the shared lock after the commit is visible, not before"
    CONFIRMED = "a worker polls once more after it has acquired the lock"
    PRODUCERS_AWAITED = "a worker that met producers at the lock polls again until they have ended"
    WAKE_CLEARED_FIRST = "a worker clears earlier wake-ups before its poll, not after it"
    WAKE_KEPT_WHILE_CONFIRMING = "the poll after it does not clear a wake-up that arrives while the worker acquires"
    RELEASE_ANNOUNCED = "a watch that ends is announced"
    LOCK_RELEASE_ANNOUNCED = "a released wake-up lock is announced"
    NEWS_KEPT_WHILE_ASKING = "an announcement that comes before the answer makes the worker ask again"
    FULL_RELEASES = "a worker without room releases its watch"
    WATCH_OF_TOPICS = "workers of other topics have a watch of their own"
    EVERY_WATCH_ANSWERS = "a watch answers notifications whether or not it has the wake-up lock itself"
    IDLE_LOOKS = "a worker that relies on the watch polls some time after each notification"
    IDLE_LOOKS_WHILE_POLLED = "it also polls now and then while no worker has the wake-up lock"
    LOOK_OF_TOPICS = "an announced look spares only workers of the same topics theirs"
    LOOK_ANNOUNCED_FIRST = "a look is announced before its poll, not after it"
    LOOK_ONLY_POSTPONED_WHILE_POLLED = "while no worker has the wake-up lock, it only postpones theirs"
    LISTEN_FIRST = "a listener that reconnects listens before its worker polls"
    POLL_AFTER_RECONNECT = "a worker polls when its listener is back"
    POLL_WHEN_LOST = "a worker polls when its listener is lost"
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
    """A worker: the step of its main task, its wake-up event, its listener, its locks, its claim and messages in
    flight.

    The locks of a worker end with its link. The link is up, broken (not noticed yet), lost (noticed), gone (closed)
    or deaf (connected, but not listening yet). `knows_watch` and `news` belong to the answer to its query for locks.
    `inbox` are the notifications in transit, in their order: of a message (m), of the end of a watch (e), of a released
    wake-up lock (r) and of a look (l). `owes_look` means that its timer for a look runs, `looks` that it has ended.
    """

    at: str = "polls"
    wake: bool = False
    link: str = "up"
    inbox: str = ""
    wake_up_lock: bool = False
    watch: bool = False
    knows_watch: bool = False
    relies: bool = False
    news: bool = False
    owes_look: bool = False
    looks: bool = False
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
_HEARD = {
    "m": "of a message",
    "e": "that a watch has ended",
    "r": "that a lock was released",
    "l": "that another worker looks",
}
_SWAPPED = (0b00, 0b10, 0b01, 0b11)


@dataclass(frozen=True, slots=True)
class Doorbell:
    """The model of workers and producers.

    `sends` names the messages of each producer, one transaction each; `handles` is each worker's mask of messages.
    With `has_key`, message 1 supersedes message 0 and has to wait while message 0 is in flight. With `polls`, a
    worker on watch may poll instead of sleeping. With `fills`, it may have no room after a claim. A frozen worker
    keeps its locks and does nothing more. With `begins_frozen`, the first worker of each mask is on watch and frozen
    from the start, asleep or with `polls` polling, and the others rely on it. Only then looks are announced: the model
    is too large otherwise.
    """

    sends: tuple[tuple[int, ...], ...]
    handles: tuple[int, ...]
    has_key: bool = False
    polls: bool = False
    fills: bool = False
    breaks: int = 0
    deaths: int = 0
    freezes: int = 0
    begins_frozen: bool = False
    without: frozenset[Guard] = frozenset()

    def initial(self) -> World:
        workers = (Worker(),) * len(self.handles)
        if self.begins_frozen:
            first = [self.handles.index(handled) == index for index, handled in enumerate(self.handles)]
            has_lock = [not self.polls and index == 0 for index in range(len(first))]
            workers = tuple(
                Worker("frozen", watch=True, knows_watch=True, wake_up_lock=lock)
                if is_first
                else Worker("sleeps", relies=not self.polls, owes_look=self.polls)
                for is_first, lock in zip(first, has_lock, strict=True)
            )
        return World(0, (Producer(),) * len(self.sends), workers, self.breaks, self.deaths, self.freezes)

    @property
    def _may_freeze(self) -> bool:
        return self.freezes > 0 or self.begins_frozen

    def canonical(self, state: World) -> World:
        choices = [state]
        # The producers are interchangeable together with their messages and the workers of these.
        if self.sends == ((0,), (1,)) and self.handles == tuple(_SWAPPED[mask] for mask in reversed(self.handles)):
            choices.append(_swapped(state))
        if len(set(self.handles)) == 1:
            choices = [choice._replace(workers=tuple(sorted(choice.workers))) for choice in choices]
        return min(choices)

    def fault(self, state: World) -> str:
        """Return a claimable message whose workers with room all sleep while none is about to poll."""
        if not state.due or any(producer.at == "visible" and producer.notifies for producer in state.producers):
            return ""
        if any(worker.at in ("released all", "released lock") or worker.asks for worker in state.workers):
            return ""
        claimed = _union(worker.locked for worker in state.workers) | self._waiting(state)
        for message in _bits(state.due & ~claimed):
            able = [
                worker
                for handled, worker in zip(self.handles, state.workers, strict=True)
                if handled >> message & 1 and worker.at != "full"
            ]
            if able and not any(_may_poll(worker) for worker in able):
                return f"message {message} waits, and all workers that handle it are idle"
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
        if state.freezes and worker.at in ("sleeps", "pauses", "awaits producers"):
            frozen = _with(
                state,
                index,
                worker._replace(at="frozen", inbox="", owes_look=False, looks=False, wake=False),
            )
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
                if any(_has_lock(worker) for worker in state.workers):
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

    # --- worker -------------------------------------------------------------------------------------------------------

    def _work(  # noqa: C901 - one clause for each place
        self, state: World, index: int, worker: Worker
    ) -> Iterator[Step]:
        match worker.at:
            case "polls":
                yield from self._poll(state, index, worker)
            case "claims":
                yield from self._take(state, index, worker)
            case "takes":
                yield from self._commit_claim(state, index, worker)
            case "full":
                yield "has room again", _with(state, index, worker._replace(at="polls"))
            case "releases all" | "released all":
                yield from self._release_all(state, index, worker)
            case "releases lock" | "released lock":
                yield from self._release_lock(state, index, worker)
            case "acquires":
                yield from self._pause(state, index, worker)
                yield from self._acquire(state, index, worker)
            case "tries" | "asks" | "unlocks" | "answered":
                yield from self._ask(state, index, worker)
            case "pauses":
                yield "ends its pause at a high rate", _with(state, index, worker._replace(at="polls"))
            case "awaits producers":
                yield "ends its short pause", _with(state, index, worker._replace(at="polls"))
            case "falls asleep":
                is_up = worker.link in ("up", "broken", "deaf")
                yield (
                    ("sleeps", _with(state, index, worker._replace(at="sleeps")))
                    if is_up
                    else ("sleeps for a second: it has no listener", _with(state, index, worker._replace(at="naps")))
                )
            case "sleeps" if worker.wake:
                yield "wakes", _with(state, index, worker._replace(at="polls"))
            case "sleeps" if self.polls and worker.knows_watch:
                yield "wakes for another message", _with(state, index, worker._replace(at="polls"))
            case "naps":
                yield "wakes by itself", _with(state, index, worker._replace(at="polls"))

    def _poll(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        if worker.looks and not worker.answer and Guard.LOOK_ANNOUNCED_FIRST not in self.without:
            yield from self._announce_look(state, index, worker)
            return
        seen = state.due & self.handles[index] & ~self._waiting(state)
        forgets = Guard.WAKE_KEPT_WHILE_CONFIRMING in self.without if worker.answer else True
        wake = worker.wake and (not forgets or Guard.WAKE_CLEARED_FIRST in self.without)
        claiming = worker._replace(at="claims", seen=seen, wake=wake)
        yield f"begins a claim that sees {_names(seen)}", _with(state, index, claiming)

    def _announce_look(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        now = _with(state, index, worker._replace(looks=False))
        any_topics = Guard.LOOK_OF_TOPICS in self.without
        spared = {number for number, handled in enumerate(self.handles) if any_topics or handled == self.handles[index]}
        yield "announces its look", _notify(now, index, "l", spared) if worker.link == "up" else now

    def _take(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        taken = worker.seen & state.due & ~_union(other.locked for other in state.workers)
        if taken & self._waiting(state):
            yield from self._fail_claim(state, index, worker)
        elif taken:
            yield (
                f"locks message {_names(taken)}",
                _with(state, index, worker._replace(at="takes", seen=0, locked=taken)),
            )
        elif worker.looks and not worker.answer:
            yield from self._announce_look(state, index, worker)
        else:
            wake = worker.wake and (bool(worker.answer) or Guard.WAKE_CLEARED_FIRST not in self.without)
            after = "falls asleep" if worker.answer else "acquires"
            now = worker._replace(at=after, seen=0, answer="", wake=wake)
            yield "finds nothing", _with(state, index, now)

    def _commit_claim(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        yield from self._fail_claim(state, index, worker)
        held = 0
        if self.has_key:
            held = 0b10 if worker.locked & 0b10 else 0b01  # Both at once: the older message is superseded.
        now = worker._replace(at="polls", locked=0, answer="", held=worker.held | held)
        if Guard.WAKE_CLEARED_FIRST in self.without:
            now = now._replace(wake=False)
        label = f"has claimed message {_names(worker.locked)}"
        taken = state._replace(due=state.due & ~worker.locked)
        yield label, _with(taken, index, now)
        is_on_watch = worker.wake_up_lock or worker.watch
        if is_on_watch:
            yield f"{label}, and more may wait", _with(taken, index, now._replace(at="releases all"))
        if self.fills and (not is_on_watch or Guard.FULL_RELEASES in self.without):
            yield f"{label}, and is full", _with(taken, index, now._replace(at="full"))

    def _fail_claim(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        now = worker._replace(at="polls", seen=0, locked=0, answer="")
        yield "has to begin its claim again", _with(state, index, now)

    def _release_all(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        if worker.link != "up":
            yield (
                "cannot release its locks",
                _with(state, index, self._lost(_without_locks(worker)._replace(at="polls"))),
            )
        elif worker.at == "releases all":
            yield "releases its locks", _with(state, index, _without_locks(worker)._replace(at="released all"))
        else:
            for after, how in (("polls", ""), ("full", ", and is full"))[: 1 + self.fills]:
                now = _with(state, index, worker._replace(at=after))
                if Guard.RELEASE_ANNOUNCED in self.without:
                    yield f"does not notify{how}", now
                else:
                    yield f"notifies the other idle workers{how}", _notify(now, index, "e")

    def _pause(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Let a worker on watch poll instead of sleeping, at any time."""
        if not self.polls:
            return
        if worker.knows_watch and worker.wake_up_lock:
            yield "is about to poll at a high rate", _with(state, index, worker._replace(at="releases lock"))
        elif worker.knows_watch:
            yield "polls on at a high rate", _with(state, index, worker._replace(at="pauses"))

    def _release_lock(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        if worker.link != "up":
            yield (
                "cannot release its lock",
                _with(state, index, self._lost(worker._replace(at="pauses", wake_up_lock=False))),
            )
        elif worker.at == "releases lock":
            yield (
                "releases its lock and stays on watch",
                _with(state, index, worker._replace(at="released lock", wake_up_lock=False)),
            )
        else:
            now = _with(state, index, worker._replace(at="pauses"))
            announced = Guard.LOCK_RELEASE_ANNOUNCED not in self.without
            yield "notifies the other idle workers", _notify(now, index, "r") if announced else now

    def _acquire(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """ACQUIRE_LOCKS tries several locks in turn. Each try is a step, and so is the answer."""
        if worker.wake_up_lock or worker.relies:
            yield "still has what it asked for", _with(state, index, worker._replace(at="falls asleep"))
        elif worker.link not in ("up", "deaf"):
            lost = worker if worker.link == "gone" else self._lost(worker)
            yield "has no listener to ask", _with(state, index, lost._replace(at="falls asleep"))
        elif worker.watch or not self._has_other_watch(state, index):
            now = worker._replace(at="tries", watch=True, news=False)
            yield "is on watch", _with(state, index, now)
        else:
            has_lock = any(_has_lock(other) for other in state.workers)
            now = worker._replace(at="answered", news=False, answer="relies" if has_lock else "is polled")
            yield "finds another one on watch", _with(state, index, now)

    def _ask(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        if worker.link not in ("up", "deaf"):
            lost = self._lost(_without_locks(worker)._replace(at="falls asleep", answer=""))
            yield "has no listener to ask", _with(state, index, lost)
            return
        match worker.at:
            case "tries" if _is_free(state):
                now = worker._replace(at="answered", wake_up_lock=True, answer="acquired")
                yield "acquires the lock", _with(state, index, now)
            case "tries":
                yield "cannot have the lock alone", _with(state, index, worker._replace(at="asks"))
            case "asks" if any(_has_lock(other) for other in state.workers):
                now = worker._replace(at="answered", answer="relies")
                yield "finds that another one has the lock", _with(state, index, now)
            case "asks":
                yield "can have the lock shared", _with(state, index, worker._replace(at="unlocks"))
            case "unlocks":
                now = worker._replace(at="answered", answer="producers")
                yield "knows that producers are under way", _with(state, index, now)
            case "answered":
                yield "has the answer", _with(state, index, self._after_answer(worker))

    def _after_answer(self, worker: Worker) -> Worker:
        has_news = worker.news and Guard.NEWS_KEPT_WHILE_ASKING not in self.without
        relies = worker.answer == "relies" and not has_news
        owes_look = worker.owes_look
        if worker.answer == "is polled" and self._may_freeze and Guard.IDLE_LOOKS_WHILE_POLLED not in self.without:
            owes_look = True
        answer = "producers" if worker.answer == "producers" else "acquired"
        if answer == "producers" and Guard.PRODUCERS_AWAITED in self.without:
            answer = "acquired"
        answered = worker._replace(
            knows_watch=worker.watch,
            relies=relies,
            owes_look=owes_look,
            wake=worker.wake or has_news,
            news=False,
            answer=answer,
        )
        if answer == "producers":
            return answered._replace(at="awaits producers", answer="")
        if Guard.CONFIRMED in self.without:
            return answered._replace(at="falls asleep", answer="")
        return answered._replace(at="polls")

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
        is_asking = worker.at in ("tries", "asks", "unlocks", "answered", "released all", "released lock") or (
            worker.at == "polls" and worker.answer != ""
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
                wake = worker.wake or Guard.POLL_AFTER_RECONNECT not in self.without
                link = "deaf" if Guard.LISTEN_FIRST in self.without else "up"
                yield "has a listener again", _with(state, index, worker._replace(link=link, wake=wake))
            case "deaf":
                yield "listens", _with(state, index, worker._replace(link="up"))
        if worker.link in ("up", "deaf") and state.breaks:
            broken = _with(state, index, worker._replace(link="broken", inbox=""))
            yield "has its listener cut off, and its locks with it", broken._replace(breaks=state.breaks - 1)

    def _hear(self, state: World, index: int, worker: Worker) -> Iterator[Step]:
        """Deliver notifications between any two steps, also before the answer to the worker's query."""
        if worker.inbox:
            heard = self._after_hearing(worker._replace(inbox=worker.inbox[1:]), worker.inbox[0])
            yield f"hears {_HEARD[worker.inbox[0]]}", _with(state, index, heard)
        if worker.owes_look:
            now = worker._replace(owes_look=False, looks=self.begins_frozen, wake=True)
            yield "is to look, in case the watch hangs", _with(state, index, now)

    def _after_hearing(self, worker: Worker, notification: str) -> Worker:
        if notification == "l":
            is_spared = worker.relies or Guard.LOOK_ONLY_POSTPONED_WHILE_POLLED in self.without
            return worker._replace(owes_look=worker.owes_look and not is_spared)
        is_asking = worker.at in ("tries", "asks", "unlocks", "answered")
        is_end = notification == "e"
        answers = worker.knows_watch and (
            worker.wake_up_lock or notification == "r" or Guard.EVERY_WATCH_ANSWERS not in self.without
        )
        looks = self._may_freeze and worker.relies and Guard.IDLE_LOOKS not in self.without
        return worker._replace(
            wake=worker.wake or is_end or answers,
            owes_look=worker.owes_look or (looks and not is_end and not answers),
            relies=worker.relies and notification == "m",
            news=worker.news or (is_asking and notification != "m"),
        )

    def _lost(self, worker: Worker) -> Worker:
        wake = worker.wake or Guard.POLL_WHEN_LOST not in self.without
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
            is_found = _has_successor(state, worker.asks)
            is_own = bool(self.handles[index] & 0b10)
            wake = worker.wake or (is_found and is_own)
            following = _with(state, index, worker._replace(asks=0, wake=wake))
            if is_found and not is_own and Guard.SUCCESSORS_OF_OTHERS not in self.without:
                following = _notify(following, index, "e")
            yield "asks for successors", following


# --- state ------------------------------------------------------------------------------------------------------------


def _bits(mask: int) -> Iterator[int]:
    return (bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def _swapped(state: World) -> World:
    """Return the state with the two producers, their messages and the workers of these exchanged."""
    workers = tuple(
        worker._replace(seen=_SWAPPED[worker.seen], locked=_SWAPPED[worker.locked])
        for worker in reversed(state.workers)
    )
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


def _notify(state: World, sender: int, notification: str, receivers: Collection[int] | None = None) -> World:
    """Send a notification to every listening session, but not to the sender. PostgreSQL delivers them in order."""
    return state._replace(
        workers=tuple(
            worker._replace(inbox=_with_notification(worker.inbox, notification))
            if worker.link == "up"
            and worker.at != "frozen"
            and index != sender
            and (receivers is None or index in receivers)
            else worker
            for index, worker in enumerate(state.workers)
        )
    )


def _with_notification(inbox: str, notification: str) -> str:
    """Add a notification. A repeated one, which changes nothing, is left out: it keeps the model finite."""
    if notification == "l":
        return inbox.replace("l", "") + "l"
    later_than_look = inbox[inbox.rfind("l") + 1 :]
    return inbox if later_than_look.count(notification) == (2 if notification == "m" else 1) else inbox + notification


def _without_locks(worker: Worker) -> Worker:
    return worker._replace(
        wake_up_lock=False, watch=False, knows_watch=False, relies=False, owes_look=False, looks=False
    )


def _is_up(worker: Worker) -> bool:
    return worker.link in ("up", "deaf")


def _has_lock(worker: Worker) -> bool:
    return worker.wake_up_lock and _is_up(worker)


def _is_free(state: World) -> bool:
    return not (
        any(producer.is_shared for producer in state.producers)
        or any(_has_lock(worker) or worker.at == "unlocks" for worker in state.workers)
    )


def _is_at_rest(worker: Worker) -> bool:
    is_pending = worker.wake or worker.inbox or (worker.owes_look and worker.relies) or worker.held
    return worker.at == "sleeps" and worker.link == "up" and not is_pending


def _may_poll(worker: Worker) -> bool:
    """Return whether a worker is awake, or its timer or a notification in transit will wake it."""
    if worker.at in ("dead", "frozen"):
        return False
    if worker.at != "sleeps" or worker.link in ("broken", "lost", "gone"):
        return True
    return bool(worker.wake or worker.owes_look or worker.looks or worker.inbox.strip("l"))


def _has_successor(state: World, done: int) -> bool:
    return bool(done & 0b01 and state.due & 0b10)
