"""Another worker by hand: one function for each statement of a worker, and workers whose sleep tests can await.

The statements are looked up when they run, so that a test which mutates a statement also mutates its action.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from pgoutbox.database import sql
from pgoutbox.database.store import ClaimedRow, HeldRow, Store
from pgoutbox.kernel import statements
from pgoutbox.kernel.seams import Row, Step
from pgoutbox.message import AttemptOutcome, ReasonCode, State
from pgoutbox.observability.events import Telemetry
from pgoutbox.worker import Worker
from pgoutbox.worker.kernel_run import Link, kernel_of
from pgoutbox.worker.queues import Turns, parse_queues
from pgoutbox.worker.run import WorkerRun
from pgoutbox.worker.run_state import RunState
from tests.support import held_messages
from tests.support.outbox_actions import LEASE_SECONDS, make_due

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from datetime import datetime

    import psycopg

    from pgoutbox import Settings
    from tests.conftest import Connect

_PAGE = 500
# The lanes of claim.sql.
FRESH, RETRIES, ORDERED = 0, 1, 3
LAPSED_DISTANCE_SECONDS = 0.05


def claim(
    connection: psycopg.Connection,
    *,
    queue: str = "default",
    topics: Sequence[str] = ("greet",),
    hold_topics: Sequence[str] = (),
    total: int = 100,
    lanes: Sequence[int] = (FRESH, RETRIES),
    suspects: bool = True,
    spread: bool = True,
    fresh_only: bool = False,
    worker: str = "worker-1",
    held: Sequence[int] = (),
    hooks: str = "{}",
    again_on: tuple[type[psycopg.Error], ...] = (),
) -> list[ClaimedRow]:
    """Claim from all lanes except the ordered one, or only fresh messages. Return the rows ordered by id.

    Without `spread`, all messages of lapsed attempts are due at once. After an error in `again_on`, claim again.
    """
    rows: list[ClaimedRow] = []
    if not fresh_only:
        rows += end_lapsed(
            connection,
            queue=queue,
            topics=topics,
            hold_topics=hold_topics,
            total=total,
            suspects=int(suspects),
            worker=worker,
            held=held,
            hooks=hooks,
            spread=spread,
        )
        rows = [row for row in rows if row.state != State.PENDING]
    while len(rows) < total:
        try:
            rows += claim_lanes(
                connection,
                (FRESH,) if fresh_only else lanes,
                queue=queue,
                topics=topics,
                total=total - len(rows),
                worker=worker,
            )
            break
        except again_on:
            continue
    return sorted(judged(connection, rows), key=lambda row: row.id)


def claim_lanes(connection: psycopg.Connection, lanes: Sequence[int], **options: Unpack[Claim]) -> list[ClaimedRow]:
    """Claim from these lanes."""
    return [row for row in claim_rows(connection, lanes, **options) if row.topic]


class Claim(TypedDict, total=False):
    """The options of a claim."""

    queue: str
    topics: Sequence[str]
    total: int
    worker: str
    after: Mapping[int, tuple[datetime, int]]
    """For lanes of which only messages behind a due time and an id are claimed."""
    after_key: str | None
    """The ordering key behind which the page begins, or None for a random one."""
    key_limit: int


def claim_parameters(lanes: Sequence[int], **options: Unpack[Claim]) -> dict[str, object]:
    """Return the parameters of a claim from the beginning of these lanes."""
    starts = [options.get("after", {}).get(lane, (None, 0)) for lane in lanes]
    queue = options.get("queue", "default")
    return {
        "served": [queue],
        "queues": [queue] * len(lanes),
        "lanes": list(lanes),
        "after_ats": [at for at, _ in starts],
        "after_ids": [message_id for _, message_id in starts],
        "since_seconds": [1e9] * len(lanes),
        "known_lanes": [],
        "known_keys": [],
        "after_keys": [options.get("after_key", "") if lane == ORDERED else None for lane in lanes],
        "key_limit": options.get("key_limit", _PAGE),
        "topics": list(options.get("topics", ["greet"])),
        "total": options.get("total", 100),
        "worker": options.get("worker", "worker-1"),
        "lease_seconds": LEASE_SECONDS,
    }


def claim_rows(connection: psycopg.Connection, lanes: Sequence[int], **options: Unpack[Claim]) -> list[ClaimedRow]:
    """Claim from these lanes. A row without a message ends a page of ordering keys."""
    statement = statements.CLAIM if ORDERED in lanes else statements.CLAIM_WITHOUT_KEYS
    return [
        ClaimedRow._make(row) for row in connection.execute(statement, claim_parameters(lanes, **options)).fetchall()
    ]


def claim_ordered(connection: psycopg.Connection, **options: Unpack[Claim]) -> list[ClaimedRow]:
    """Claim the first message of each ordering key."""
    return sorted(claim_lanes(connection, (ORDERED,), **options), key=lambda row: row.id)


def lapsed(
    connection: psycopg.Connection,
    *,
    queue: str = "default",
    topics: Sequence[str] = ("greet",),
    hold_topics: Sequence[str] = (),
    total: int = 100,
    suspects: int = 0,
    worker: str = "worker-1",
    held: Sequence[int] = (),
    hooks: str = "{}",
    spread: bool = True,
) -> list[ClaimedRow]:
    """End lapsed attempts, and take over a suspect. Without `spread`, all of their messages are due at once."""
    parameters = {
        "topics": list(topics),
        "hold_topics": list(hold_topics),
        "hooks": hooks,
        "in_flight": list(held),
        "worker": worker,
        "total": total,
        "suspects": suspects,
        "queues": [queue],
        "lease_seconds": LEASE_SECONDS,
        "distance_seconds": LAPSED_DISTANCE_SECONDS,
    }
    rows = [ClaimedRow._make(row) for row in connection.execute(statements.LAPSED, parameters).fetchall()]
    if not spread:
        make_due(connection, *(row.id for row in rows if row.state == State.PENDING))
    return rows


def end_lapsed(connection: psycopg.Connection, **options: Any) -> list[ClaimedRow]:  # noqa: ANN401 - those of `lapsed`
    """End lapsed attempts, and first forget the claims that have none. `suspects` is 0 unless it is given."""
    connection.execute(statements.FORGET_LAPSED)
    return lapsed(connection, **options)


def judged(connection: psycopg.Connection, rows: Sequence[ClaimedRow]) -> list[ClaimedRow]:
    """Return the rows of a claim, each with whether a newer message has overtaken it."""
    keyed = [row.id for row in rows if row.coalesce_key is not None and row.state == State.SENDING]
    overtaken = {row[0] for row in connection.execute(statements.OVERTAKEN, {"ids": keyed}).fetchall()}
    return [row._replace(superseded=row.id in overtaken) for row in rows]


def ids_in_flight(rows: Sequence[ClaimedRow]) -> list[int]:
    """Return the ids of the claimed rows that are to be delivered."""
    return [row.id for row in rows if row.state == State.SENDING]


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
    """Finish attempts (an id, an attempt count and perhaps a claim) as sent. Return the ids that were written.

    Like the worker, it reads no partition of finished messages.
    """
    ids = {message_id for message_id, *_ in attempts}
    live = _live_ids(connection, ids)
    for number in {attempt_count for _, attempt_count, *_ in attempts}:
        same = [attempt for attempt in attempts if attempt[1] == number]
        parameters = {**fence_of(connection, same, worker), "attempt_count": number}
        parameters["claimed_ats"] = sorted({at for at in parameters["claimed_ats"] if at is not None})  # type: ignore[attr-defined] # a list
        connection.execute(statements.FINISH_SENT, parameters)
    return live - _live_ids(connection, ids)


def _live_ids(connection: psycopg.Connection, ids: Collection[int]) -> set[int]:
    found = connection.execute("SELECT id FROM pgoutbox.message_live WHERE id = ANY (%s)", [list(ids)]).fetchall()
    return {message_id for (message_id,) in found}


def claim_probe(connection: psycopg.Connection) -> list[tuple[int, str]]:
    """Begin a probe. Return the message and the id of the probe."""
    parameters = {
        "queues": ["default"],
        "topics": ["greet"],
        "worker": "worker-1",
        "lease_seconds": LEASE_SECONDS,
        "probe_seconds": 60.0,
    }
    return [(row[0], row[-2]) for row in connection.execute(statements.CLAIM_PROBE, parameters).fetchall()]


def postpone(connection: psycopg.Connection, message_id: int) -> None:
    """Finish the first attempt of a message, which the breaker holds back."""
    connection.execute(
        statements.FINISH_AND_HOLD,
        {
            **fence_of(connection, [(message_id, 1)], "worker-1"),
            "outcomes": [AttemptOutcome.SNOOZED],
            "reasons": ["open"],
            "reason_codes": [ReasonCode.CIRCUIT_OPEN],
            "breaker_keys": [held_messages.KEY],
            "error_places": [None],
            "delays": [30.0],
            "fails_after": [None],
            "held_delays": [0.0],
            "hooks": "{}",
        },
    )


def forget_sent(connection: psycopg.Connection, *attempts: Attempted, worker: str = "worker-1") -> set[int]:
    """Finish attempts as sent, and delete messages that a retention rule deletes at once. Return the written ids."""
    answer = connection.execute(statements.FORGET_SENT, fence_of(connection, attempts, worker))
    return {row[0] for row in answer.fetchall()}


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
        "held_delays": [None for _ in ends],
        "hooks": hooks,
    }
    return {row[0]: State(row[1]) for row in connection.execute(statements.FINISH, parameters).fetchall()}


def current_states(connection: psycopg.Connection, *attempts: Attempted, worker: str = "worker-1") -> dict[int, State]:
    """Return the states of the messages of these attempts, unless others have taken them over."""
    parameters = fence_of(connection, attempts, worker)
    return {row[0]: State(row[1]) for row in connection.execute(statements.STATES, parameters).fetchall()}


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
    """Return the state of a run for the tests of a single part. Its kernel does not run."""
    state = RunState(
        settings,
        Store(settings, worker=name),
        Telemetry(logging.getLogger("pgoutbox.worker")),
        queues=Turns(parse_queues(queues)),
        topics=["greet"],
        stopping=asyncio.Event(),
    )
    nothing: Any = None
    kernel_of(state, nothing, nothing, hold_topics=(), handle_error=nothing)
    return state


def run_of(worker: Worker) -> WorkerRun:
    """Return the parts of the current run, or of the last one."""
    assert worker._run is not None
    return worker._run


class WatchedWorker(Worker):
    """A worker that signals when it is idle.

    `asleep` is set when nothing has woken it yet. `sleeping` is set when it has also queried until when it may
    sleep. Later messages have to wake it.
    """

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
        run_of(self).kernel.want()
        await self.falls_asleep()

    def _new_run(self, *, ends_by_itself: bool) -> WorkerRun:
        run = super()._new_run(ends_by_itself=ends_by_itself)
        kernel = run.kernel
        know_due, wait = kernel._know_due, kernel._wait
        has_asked = False

        async def watched_know_due() -> None:
            nonlocal has_asked
            if not kernel._wake.is_set():
                self.asleep.set()
            has_asked = True
            await know_due()

        async def watched_wait(seconds: float) -> bool:
            nonlocal has_asked
            if has_asked and self.asleep.is_set() and not kernel._wake.is_set():
                self.sleeping.set()
            has_asked = False
            return await wait(seconds)

        kernel._know_due = watched_know_due  # type: ignore[method-assign] # watched, and otherwise the same
        kernel._wait = watched_wait  # type: ignore[method-assign] # the same
        return run


def ask_for_locks(connection: psycopg.Connection, *queues: str) -> list[tuple[str, str, float | None, float]]:
    """Take the locks of an idle worker, as hold.sql does. Return its rows."""
    # The watch of another application than that of the tests: its key is any number.
    return connection.execute(
        statements.HOLD, {"queues": list(queues), "watch_keys": list(range(len(queues)))}
    ).fetchall()


@contextmanager
def sleeping_worker(connect: Connect, standing: str = "holds") -> Iterator[Callable[[], list[str]]]:
    """Open a session that listens and has armed the bell. Yield a function that returns the rung queues so far."""
    listener = connect(autocommit=True)
    listener.execute("LISTEN pgoutbox")
    ((_, found, _, _),) = ask_for_locks(listener, "default")
    assert found == standing
    yield lambda: [notification.payload for notification in listener.notifies(timeout=10, stop_after=1)]


Trip = Callable[[Sequence[Step]], Awaitable[list[list[Row]]]]


def around_trips(around: Callable[[Sequence[Step], Trip], Awaitable[list[list[Row]]]]) -> Any:  # noqa: ANN401 - for setattr
    """Return a replacement of `Link.trip` that passes each trip of a worker through this function."""
    trip = Link.trip

    async def wrapped(self: Link, steps: Sequence[Step]) -> list[list[Row]]:
        return await around(steps, partial(trip, self))

    return wrapped


def claims(steps: Sequence[Step]) -> bool:
    """Return whether a trip claims messages."""
    return any(statement in (statements.CLAIM, statements.CLAIM_WITHOUT_KEYS) for statement, _ in steps)


def has_claimed(steps: Sequence[Step], results: Sequence[Sequence[Row]]) -> bool:
    """Return whether a trip has claimed messages. The end of a page of ordering keys has a row without one."""
    return any(
        claims([step]) and any(row[0] is not None for row in rows) for step, rows in zip(steps, results, strict=True)
    )


def finishes(steps: Sequence[Step]) -> bool:
    """Return whether a trip writes ends of attempts."""
    ends = (statements.FINISH, statements.FINISH_AND_HOLD, statements.FINISH_SENT)
    return any(statement in ends for statement, _ in steps)
