"""Actions of tests on the inner parts of the worker: one function for each statement of `database.sql`, and workers
whose state tests can await.

Only tests of parts import this module, and tests of promises that still need an inner handle. It ends with the worker
(tests/acceptance.md). The statements are looked up when they run, so that a test which mutates a statement also
mutates its action.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, LiteralString

from pgoutbox.database import sql
from pgoutbox.database.store import (
    BEGINNING,
    LAPSED_DISTANCE_SECONDS,
    ClaimedRow,
    HeldRow,
    LapsedRow,
    Place,
    Store,
)
from pgoutbox.message import AttemptOutcome, ReasonCode, State
from pgoutbox.observability.events import Telemetry
from pgoutbox.worker import Worker
from pgoutbox.worker.claim_planner import QueueSchedule
from pgoutbox.worker.doorbell import Doorbell, key_of_watch
from pgoutbox.worker.poll_loop import PollResult, PollState
from pgoutbox.worker.queues import parse_queues
from pgoutbox.worker.run import WorkerRun
from pgoutbox.worker.run_state import RunState
from tests.support.outbox_actions import LEASE_SECONDS, make_due

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime

    import psycopg

    from pgoutbox import Settings
    from tests.conftest import Connect

ROW_LENGTH = len(ClaimedRow._fields) - 4  # Store adds the last four arguments.


def claim(
    connection: psycopg.Connection,
    *,
    queue: str = "default",
    topics: Sequence[str] = ("greet",),
    hold_topics: Sequence[str] = (),
    total: int = 100,
    fresh_limit: int | None = None,
    fresh_position: Place = BEGINNING,
    retry_position: Place = BEGINNING,
    suspects: bool = True,
    spread: bool = True,
    fresh_only: bool = False,
    by_permits: bool = False,
    worker: str = "worker-1",
    held: Sequence[int] = (),
    hooks: str = "{}",
    again_on: tuple[type[psycopg.Error], ...] = (),
) -> list[ClaimedRow]:
    """Claim from all lanes except the ordered one, or only from the first lane. Return the rows ordered by id.

    Without `spread`, all messages of lapsed attempts are due at once. After an error in `again_on`, run the same
    statement again.
    """
    parameters: dict[str, object] = {
        "queue": queue,
        "queues": [queue],
        "topics": list(topics),
        "hold_topics": list(hold_topics),
        "hooks": hooks,
        "in_flight": list(held),
        "worker": worker,
        "lease_seconds": LEASE_SECONDS,
    }
    rows: list[ClaimedRow] = []

    def run(statement: LiteralString, limit: int, place: Place = BEGINNING, *, was_lapsed: bool = False) -> None:
        if limit <= 0:
            return
        while True:
            try:
                answer = connection.execute(statement, {**parameters, "total": limit, **place._asdict()})
                break
            except again_on:
                continue
        rows.extend(ClaimedRow._make((*row[:ROW_LENGTH], False, queue, was_lapsed, 0)) for row in answer.fetchall())

    if not fresh_only:
        ended = end_lapsed(
            connection,
            queue=queue,
            topics=topics,
            hold_topics=hold_topics,
            total=total,
            worker=worker,
            held=held,
            hooks=hooks,
            spread=spread,
        )
        rows.extend(_without_attempt(row) for row in ended if row.state != State.PENDING)
        if suspects:
            run(sql.CLAIM_LAPSED, min(1, total - len(rows)), was_lapsed=True)
    fresh = total - len(rows) if fresh_limit is None else min(fresh_limit, total - len(rows))
    run(sql.CLAIM_FRESH_BY_PERMITS if by_permits else sql.CLAIM_FRESH, fresh, fresh_position)
    if not fresh_only:
        run(sql.CLAIM_RETRIES_BY_PERMITS if by_permits else sql.CLAIM_RETRIES, total - len(rows), retry_position)
    return sorted(judged(connection, rows), key=lambda row: row.id)


def end_lapsed(
    connection: psycopg.Connection,
    *,
    queue: str = "default",
    topics: Sequence[str] = ("greet",),
    hold_topics: Sequence[str] = (),
    total: int = 100,
    worker: str = "worker-1",
    held: Sequence[int] = (),
    hooks: str = "{}",
    spread: bool = True,
) -> list[LapsedRow]:
    """End lapsed attempts. Without `spread`, all of their messages are due at once."""
    parameters = {
        "topics": list(topics),
        "hold_topics": list(hold_topics),
        "hooks": hooks,
        "in_flight": list(held),
        "worker": worker,
        "total": total,
        "queues": [queue],
        "distance_seconds": LAPSED_DISTANCE_SECONDS,
    }
    rows = [LapsedRow._make(row) for row in connection.execute(sql.END_LAPSED, parameters).fetchall()]
    if not spread:
        make_due(connection, *(row.id for row in rows if row.state == State.PENDING))
    return rows


def _without_attempt(row: LapsedRow) -> ClaimedRow:
    """Return the row of a message that a claim has ended, without what a handler gets."""
    known = {name: value for name, value in row._asdict().items() if name in ClaimedRow._fields}
    return ClaimedRow(**(dict.fromkeys(ClaimedRow._fields) | known | {"was_lapsed": True}))  # type: ignore[arg-type] # the rest does not matter


def judged(connection: psycopg.Connection, rows: Sequence[ClaimedRow]) -> list[ClaimedRow]:
    """Return the rows of a claim, each with whether a newer message has overtaken it."""
    keyed = [row.id for row in rows if row.coalesce_key is not None and row.state == State.SENDING]
    overtaken = {row[0] for row in connection.execute(sql.OVERTAKEN, {"ids": keyed}).fetchall()}
    return [row._replace(superseded=row.id in overtaken) for row in rows]


def find_ordered(
    connection: psycopg.Connection, *, topics: Sequence[str] = ("greet",), after_key: str = "", key_limit: int = 100
) -> tuple[list[int], str | None, int]:
    """Return the claimable messages of the keys after `after_key`, the last key seen, and the number of keys seen."""
    parameters = {"queue": "default", "topics": list(topics), "after_key": after_key, "key_limit": key_limit}
    ((ids, last_key, count),) = connection.execute(sql.FIND_ORDERED, parameters).fetchall()
    return ids or [], last_key, count


def find_new_ordered(
    connection: psycopg.Connection, since_seconds: float, *, topics: Sequence[str] = ("greet",), key_limit: int = 100
) -> list[int]:
    """Return the claimable messages of the keys of messages that fell due in the last `since_seconds`."""
    parameters = {"queue": "default", "topics": list(topics), "since_seconds": since_seconds, "key_limit": key_limit}
    return sorted(row[0] for row in connection.execute(sql.FIND_NEW_ORDERED, parameters).fetchall())


def claim_ordered(
    connection: psycopg.Connection, *ids: int, worker: str = "worker-1", total: int | None = None
) -> list[ClaimedRow]:
    """Claim the found messages; by default all that can be found."""
    found = list(ids) or find_ordered(connection)[0]
    parameters = {
        "queue": "default",
        "ids": found,
        "total": len(found) if total is None else total,
        "worker": worker,
        "lease_seconds": LEASE_SECONDS,
    }
    answer = connection.execute(sql.CLAIM_ORDERED, parameters)
    rows = [ClaimedRow._make((*row, False, "default", False, 0)) for row in answer.fetchall()]
    return sorted(judged(connection, rows), key=lambda row: row.id)


def ids_in_flight(rows: Sequence[ClaimedRow]) -> list[int]:
    """Return the ids of the claimed rows that are to be delivered."""
    return [row.id for row in rows if row.state == State.SENDING]


# A finish deletes no claims, and waits shortly for a locked row.
_NOTHING_ELSE: dict[str, object] = {"ended_claims": [], "lock_timeout": "20ms"}


@dataclass(frozen=True, slots=True)
class End:
    """An outcome to be written, of the attempt with this number of a message. Its claim is that of the row's last
    attempt, unless it is given.
    """

    id: int
    attempt_count: int
    outcome: AttemptOutcome
    reason: str | None = None
    delay_seconds: float = 0.0
    reason_code: ReasonCode | None = None
    breaker_key: str | None = None
    error_place: str | None = None
    fails_after_seconds: float | None = None
    claimed_at: datetime | None = None


Attempted = tuple[int, int] | tuple[int, int, "datetime"]


def fence_of(connection: psycopg.Connection, attempts: Sequence[Attempted], worker: str) -> dict[str, object]:
    """Return the parameters of the fence. An attempt without a claim has that of the last attempt of its row."""
    claimed_at = claimed_ats(connection, *(message_id for message_id, *_ in attempts))
    ordered = sorted(attempts)
    return {
        "ids": [message_id for message_id, *_ in ordered],
        "attempt_counts": [attempt_count for _, attempt_count, *_ in ordered],
        "claimed_ats": [rest[0] if rest else claimed_at.get(message_id) for message_id, _, *rest in ordered],
        "worker": worker,
    }


def claimed_ats(connection: psycopg.Connection, *ids: int) -> dict[int, datetime]:
    """Return when the last attempts of these messages were claimed, by the ids of their messages.

    It locks no partition of finished messages, unless a message has finished.
    """
    query = "SELECT id, claimed_at FROM {} WHERE id = ANY (%s) AND claimed_at IS NOT NULL"
    found: dict[int, datetime] = {}
    for table in ("pgoutbox.message_live", "pgoutbox.message"):
        found = dict(connection.execute(query.format(table).encode(), [list(ids)]).fetchall())
        if len(found) == len(set(ids)):
            break
    return found


def finish_sent(connection: psycopg.Connection, *attempts: Attempted, worker: str = "worker-1") -> set[int]:
    """Finish attempts (an id, an attempt count and perhaps a claim) as sent. Return the ids that were written."""
    written: set[int] = set()
    for number in {attempt_count for _, attempt_count, *_ in attempts}:
        same = [attempt for attempt in attempts if attempt[1] == number]
        parameters = {**fence_of(connection, same, worker), "attempt_count": number, **_NOTHING_ELSE}
        written |= {row[0] for row in connection.execute(sql.FINISH_SENT_IF_HELD, parameters).fetchall()}
    return written


def finish_sent_and_forget(connection: psycopg.Connection, *attempts: Attempted, worker: str = "worker-1") -> set[int]:
    """Finish as sent with the statement that also deletes where a retention rule requires it."""
    parameters = fence_of(connection, attempts, worker)
    return {row[0] for row in connection.execute(sql.FINISH_SENT_AND_FORGET_IF_HELD, parameters).fetchall()}


def finish(connection: psycopg.Connection, *ends: End, worker: str = "worker-1", hooks: str = "{}") -> dict[int, State]:
    """Finish attempts with other outcomes. Return the states that were reached."""
    ends = tuple(sorted(ends, key=lambda end: end.id))
    attempts: list[Attempted] = [
        (end.id, end.attempt_count) if end.claimed_at is None else (end.id, end.attempt_count, end.claimed_at)
        for end in ends
    ]
    parameters = {
        **fence_of(connection, attempts, worker),
        "outcomes": [end.outcome for end in ends],
        "reasons": [end.reason for end in ends],
        "reason_codes": [end.reason_code for end in ends],
        "breaker_keys": [end.breaker_key for end in ends],
        "error_places": [end.error_place for end in ends],
        "delays": [end.delay_seconds for end in ends],
        "fails_after": [end.fails_after_seconds for end in ends],
        "hooks": hooks,
    }
    return {row[0]: State(row[1]) for row in connection.execute(sql.FINISH_IF_HELD, parameters).fetchall()}


def current_states(connection: psycopg.Connection, *attempts: Attempted, worker: str = "worker-1") -> dict[int, State]:
    """Return the states of the messages of these attempts, unless others have taken them over."""
    parameters = fence_of(connection, attempts, worker)
    return {row[0]: State(row[1]) for row in connection.execute(sql.CURRENT_STATES, parameters).fetchall()}


def large_payload(connection: psycopg.Connection, attempt: Attempted, *, worker: str = "worker-1") -> list[str]:
    """Return the payload that a claim has left out; nothing if the attempt does not hold its message."""
    answer = connection.execute(sql.LARGE_PAYLOAD, fence_of(connection, [attempt], worker))
    return [text for (text,) in answer.fetchall()]


def renew(connection: psycopg.Connection, *attempts: Attempted, worker: str = "worker-1") -> dict[int, HeldRow]:
    """Renew the leases of the claims of these attempts, and check them."""
    parameters = {
        "claimed_ats": list(claimed_ats(connection, *(a[0] for a in attempts)).values()),
        "worker": worker,
        "lease_seconds": LEASE_SECONDS,
    }
    connection.execute(sql.RENEW_CLAIMS, parameters)
    return watch(connection, *attempts, worker=worker)


def watch(connection: psycopg.Connection, *attempts: Attempted, worker: str = "worker-1") -> dict[int, HeldRow]:
    """Check attempts without writing."""
    parameters = fence_of(connection, attempts, worker)
    return {row[0]: HeldRow._make(row) for row in connection.execute(sql.WATCH_IF_HELD, parameters).fetchall()}


def run_state(settings: Settings, *, name: str = "w", queues: Sequence[str] = ("default",)) -> RunState:
    """Return the state of a run for the tests of a single part."""
    return RunState(
        settings,
        Store(settings, worker=name),
        Telemetry(logging.getLogger("pgoutbox.worker")),
        queues=QueueSchedule(parse_queues(queues), now=0.0),
        topics=["greet"],
        stopping=asyncio.Event(),
    )


def run_of(worker: Worker) -> WorkerRun:
    """Return the parts of the current run, or of the last one."""
    assert worker._run is not None
    return worker._run


def doorbell_of(worker: Worker) -> Doorbell:
    """Return the doorbell of the current run."""
    doorbell = run_of(worker).doorbell
    assert doorbell is not None
    return doorbell


class WatchedWorker(Worker):
    """A worker that signals when it is idle.

    `asleep` is set when nothing has woken it yet. `sleeping` is set when it has also queried until when it may
    sleep. Later messages have to wake it. `sleep_seconds` is the length of its last sleep in the state IDLE.
    """

    sleep_seconds: float | None = None
    asleep: asyncio.Event
    sleeping: asyncio.Event

    async def run(self) -> None:
        """Run, with new events."""
        self.asleep = asyncio.Event()
        self.sleeping = asyncio.Event()
        await super().run()

    async def falls_asleep(self) -> None:
        """Wait for the next time that it falls asleep. It does not end if nothing wakes the worker meanwhile."""
        self.asleep.clear()
        self.sleeping.clear()
        await self.sleeping.wait()

    async def polls_and_sleeps(self) -> None:
        """Wait until it has polled once more, after everything so far, and sleeps."""
        run_of(self).state.signals.wake.set()
        await self.falls_asleep()

    def _new_run(self, *, ends_by_itself: bool) -> WorkerRun:
        run = super()._new_run(ends_by_itself=ends_by_itself)
        wake, loop = run.state.signals.wake, run.poll_loop
        sleep, sleep_until_due = loop.sleep, loop._sleep_until_due

        async def watched_sleep_until_due(limit: float) -> PollResult:
            if not wake.is_set():
                self.asleep.set()
            return await sleep_until_due(limit)

        async def watched_sleep(seconds: float) -> bool:
            if self.asleep.is_set() and not wake.is_set():
                self.sleeping.set()
            if loop.state is PollState.IDLE:
                self.sleep_seconds = seconds
            return await sleep(seconds)

        loop.sleep = watched_sleep  # type: ignore[method-assign] # watched, and otherwise the same
        loop._sleep_until_due = watched_sleep_until_due  # type: ignore[method-assign] # the same
        return run


def ask_for_locks(
    connection: psycopg.Connection, *queues: str, topics: Sequence[str] = ("greet",)
) -> list[tuple[str, bool | None, str | None, float | None]]:
    """Query like the listener of a worker with these topics."""
    return connection.execute(
        sql.ACQUIRE_LOCKS, {"queues": list(queues), "watch_keys": [key_of_watch(queue, topics) for queue in queues]}
    ).fetchall()


@contextmanager
def sleeping_worker(connect: Connect, bell: str | None = "own") -> Iterator[Callable[[], list[str]]]:
    """Open a session that listens and has armed the bell. Yield a function that returns the rung queues so far."""
    listener = connect(autocommit=True)
    listener.execute(sql.LISTEN)
    ((_, _, wake_up_lock, _),) = ask_for_locks(listener, "default")
    assert wake_up_lock == bell
    yield lambda: [notification.payload for notification in listener.notifies(timeout=10, stop_after=1)]
