"""What a test does to an outbox: one function for each statement of `pgoutbox.sql`, on the connection of its choice,
and workers that can be waited for.

The statements are looked up when they run, so that a test which breaks one of them breaks these actions too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, LiteralString, TypedDict, Unpack

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from pgoutbox import sql
from pgoutbox.doorbell import post_keys
from pgoutbox.message import Message, Permanent, State, Transient
from pgoutbox.settings import Settings, load_settings
from pgoutbox.store import NO_FLOOR, ClaimedRow, Floor, HeldRow, Verdict
from pgoutbox.worker import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from datetime import datetime, timedelta

    import psycopg

    from pgoutbox import Outbox
    from pgoutbox.telemetry import Event

LEASE_SECONDS = 60.0
ROW_LENGTH = len(ClaimedRow._fields) - 3  # Store adds the last three.


@dataclass(frozen=True, slots=True)
class Row:
    """What one message's row says."""

    id: int
    state: str
    attempt_count: int
    max_attempts: int
    worker: str | None
    is_leased: bool
    is_finished: bool
    is_cancel_requested: bool
    due_in_seconds: float
    superseded_by: int | None
    skip_reason: str | None
    last_error: str | None


class Options(TypedDict, total=False):
    """Named arguments of `pgoutbox.enqueue`."""

    queue: str
    destination: str | None
    coalesce_key: str | None
    dedupe_key: str | None
    available_at: datetime | None
    expires_at: datetime | None
    max_attempts: int
    notify: bool
    ordering_key: str | None
    on_failed: str | None
    max_delay: timedelta | None
    coalesce_rule: str | None


def enqueue(
    connection: psycopg.Connection, topic: str = "greet", payload: object = None, **arguments: Unpack[Options]
) -> int:
    """Enqueue by the SQL function; returns the message id."""
    names = "".join(f", {name} => %({name})s" for name in arguments)
    call = f"SELECT pgoutbox.enqueue(%(topic)s, %(payload)s{names})"
    parameters = {"topic": topic, "payload": Jsonb(payload), **arguments}
    (message_id,) = connection.execute(call.encode(), parameters).fetchone() or (0,)
    return int(message_id)


def claim(
    connection: psycopg.Connection,
    *,
    queue: str = "default",
    topics: Sequence[str] = ("greet",),
    hold_topics: Sequence[str] = (),
    total: int = 100,
    fresh_limit: int | None = None,
    fresh_floor: Floor | None = None,
    retry_floor: Floor | None = None,
    suspect_limit: int = 1,
    clock_limit: datetime | None = None,
    fresh_only: bool = False,
    by_permits: bool = False,
    worker: str = "worker-1",
    held: Sequence[int] = (),
    again_on: tuple[type[psycopg.Error], ...] = (),
) -> list[ClaimedRow]:
    """Claim from all lanes but the ordered one, or from the first alone; the rows in the order of their ids.

    After an error in `again_on` the same statement is run again.
    """
    parameters: dict[str, object] = {
        "queue": queue,
        "queues": [queue],
        "topics": list(topics),
        "hold_topics": list(hold_topics),
        "clock_limit": clock_limit,
        "held": list(held),
        "set_aside": [],
        "worker": worker,
        "lease_seconds": LEASE_SECONDS,
    }
    rows: list[ClaimedRow] = []

    def run(statement: LiteralString, limit: int, floor: Floor | None = None, *, was_lapsed: bool = False) -> None:
        if limit <= 0:
            return
        floor_at, floor_id = floor or NO_FLOOR
        while True:
            try:
                answer = connection.execute(
                    statement, {**parameters, "total": limit, "floor_at": floor_at, "floor_id": floor_id}
                )
                break
            except again_on:
                continue
        rows.extend(ClaimedRow._make((*row[:ROW_LENGTH], False, queue, was_lapsed)) for row in answer.fetchall())

    if not fresh_only:
        run(sql.END_LAPSED, total, was_lapsed=True)
        run(sql.CLAIM_LAPSED, min(suspect_limit, total - len(rows)), was_lapsed=True)
    fresh = total - len(rows) if fresh_limit is None else min(fresh_limit, total - len(rows))
    run(sql.CLAIM_FRESH_BY_PERMITS if by_permits else sql.CLAIM_FRESH, fresh, fresh_floor)
    if not fresh_only:
        run(sql.CLAIM_RETRIES_BY_PERMITS if by_permits else sql.CLAIM_RETRIES, total - len(rows), retry_floor)
    return sorted(judged(connection, rows), key=lambda row: row.id)


def judged(connection: psycopg.Connection, rows: Sequence[ClaimedRow]) -> list[ClaimedRow]:
    """The rows of a claim, with the answer whether a newer message has overtaken theirs."""
    keyed = [row.id for row in rows if row.coalesce_key is not None and row.state == State.SENDING]
    overtaken = {row[0] for row in connection.execute(sql.OVERTAKEN, {"ids": keyed}).fetchall()}
    return [row._replace(superseded=row.id in overtaken) for row in rows]


def find_ordered(
    connection: psycopg.Connection, *, topics: Sequence[str] = ("greet",), after_key: str = "", key_limit: int = 100
) -> tuple[list[int], str | None, int]:
    """What can be claimed of the keys behind `after_key`, the last key seen, and how many were."""
    parameters = {"queue": "default", "topics": list(topics), "after_key": after_key, "key_limit": key_limit}
    ((ids, last_key, count),) = connection.execute(sql.FIND_ORDERED, parameters).fetchall()
    return ids or [], last_key, count


def find_new_ordered(
    connection: psycopg.Connection, floor_id: int, *, topics: Sequence[str] = ("greet",), key_limit: int = 100
) -> list[int]:
    """What can be claimed of the keys of messages beyond `floor_id`."""
    parameters = {"queue": "default", "topics": list(topics), "floor_id": floor_id, "key_limit": key_limit}
    return sorted(row[0] for row in connection.execute(sql.FIND_NEW_ORDERED, parameters).fetchall())


def claim_ordered(
    connection: psycopg.Connection, *ids: int, worker: str = "worker-1", total: int | None = None
) -> list[ClaimedRow]:
    """Claim what was found; everything that can be found if nothing is named."""
    found = list(ids) or find_ordered(connection)[0]
    parameters = {
        "queue": "default",
        "ids": found,
        "total": len(found) if total is None else total,
        "worker": worker,
        "lease_seconds": LEASE_SECONDS,
    }
    answer = connection.execute(sql.CLAIM_ORDERED, parameters)
    rows = [ClaimedRow._make((*row, False, "default", False)) for row in answer.fetchall()]
    return sorted(judged(connection, rows), key=lambda row: row.id)


def ids_in_flight(rows: Sequence[ClaimedRow]) -> list[int]:
    """The ids of those claimed rows that are to be delivered."""
    return [row.id for row in rows if row.state == State.SENDING]


def finish_sent(connection: psycopg.Connection, *attempts: tuple[int, int], worker: str = "worker-1") -> set[int]:
    """Finish attempts, each an id and its attempt count, as sent; the ids that were written."""
    finished: set[int] = set()
    for attempt_count in {attempt_count for _, attempt_count in attempts}:
        ids = [message_id for message_id, number in attempts if number == attempt_count]
        parameters = {"ids": ids, "attempt_count": attempt_count, "worker": worker}
        finished |= {row[0] for row in connection.execute(sql.FINISH_SENT_IF_HELD, parameters).fetchall()}
    return finished


def finish_sent_and_forget(
    connection: psycopg.Connection, *attempts: tuple[int, int], worker: str = "worker-1"
) -> set[int]:
    """The same by the statement that also deletes, where a rule of retention says so."""
    parameters = {"ids": [a[0] for a in attempts], "attempt_counts": [a[1] for a in attempts], "worker": worker}
    return {row[0] for row in connection.execute(sql.FINISH_SENT_AND_FORGET_IF_HELD, parameters).fetchall()}


def finish(connection: psycopg.Connection, *verdicts: Verdict, worker: str = "worker-1") -> dict[int, State]:
    """Finish attempts with other outcomes; the states that were reached."""
    parameters = {
        "ids": [v.id for v in verdicts],
        "attempt_counts": [v.attempt_count for v in verdicts],
        "outcomes": [v.outcome for v in verdicts],
        "reasons": [v.reason for v in verdicts],
        "reason_codes": [v.reason_code for v in verdicts],
        "breaker_keys": [v.breaker_key for v in verdicts],
        "delays": [v.delay_seconds for v in verdicts],
        "worker": worker,
    }
    return {row[0]: State(row[1]) for row in connection.execute(sql.FINISH_IF_HELD, parameters).fetchall()}


def renew(connection: psycopg.Connection, *attempts: tuple[int, int], worker: str = "worker-1") -> dict[int, HeldRow]:
    """Renew the leases of attempts."""
    parameters = {
        "ids": [a[0] for a in attempts],
        "attempt_counts": [a[1] for a in attempts],
        "worker": worker,
        "lease_seconds": LEASE_SECONDS,
    }
    return {row[0]: HeldRow._make(row) for row in connection.execute(sql.RENEW_IF_HELD, parameters).fetchall()}


def watch(connection: psycopg.Connection, *attempts: tuple[int, int], worker: str = "worker-1") -> dict[int, HeldRow]:
    """Look at attempts without writing."""
    parameters = {"ids": [a[0] for a in attempts], "attempt_counts": [a[1] for a in attempts], "worker": worker}
    return {row[0]: HeldRow._make(row) for row in connection.execute(sql.WATCH_IF_HELD, parameters).fetchall()}


def cancel(connection: psycopg.Connection, message_id: int) -> str:
    """Cancel by the SQL function; what it answered."""
    (answer,) = connection.execute("SELECT pgoutbox.cancel(%s)", [message_id]).fetchone() or ("",)
    return str(answer)


def redrive(connection: psycopg.Connection, message_id: int) -> bool:
    """Redrive one message; whether it was."""
    parameters = {"ids": [message_id], "states": ["failed", "cancelled"], "attempt_counts": None}
    rows = connection.execute(sql.REDRIVE, parameters).fetchall()
    return bool(rows[0][1])


def lapse(connection: psycopg.Connection, message_id: int) -> None:
    """Age an attempt in flight so that its lease has just ended, as if its worker had died."""
    connection.execute(
        "UPDATE pgoutbox.message SET lease_expires_at = now() - interval '1 ms' WHERE id = %s AND state = 'sending'",
        [message_id],
    )


def make_due(connection: psycopg.Connection, message_id: int) -> None:
    """Age a pending message so that it is due."""
    connection.execute(
        "UPDATE pgoutbox.message_live SET available_at = now() - interval '1 ms' WHERE id = %s AND state = 'pending'",
        [message_id],
    )


def expire(connection: psycopg.Connection, message_id: int) -> None:
    """Age a message so that the time after which it must not be delivered has passed."""
    connection.execute(
        "UPDATE pgoutbox.message_live SET expires_at = now() - interval '1 ms' WHERE id = %s", [message_id]
    )


def row_of(connection: psycopg.Connection, message_id: int) -> Row:
    """The row of one message."""
    (row,) = rows_of(connection, message_id)
    return row


def rows_of(connection: psycopg.Connection, *message_ids: int) -> list[Row]:
    """The rows of these messages, or of all, in the order of their ids."""
    with connection.cursor(row_factory=class_row(Row)) as cursor:
        cursor.execute(
            """
            SELECT
                m.id,
                m.state,
                m.attempt_count,
                m.max_attempts,
                m.worker,
                m.lease_expires_at IS NOT NULL AS is_leased,
                m.finished_at IS NOT NULL AS is_finished,
                m.cancel_requested_at IS NOT NULL AS is_cancel_requested,
                extract(epoch FROM m.available_at - now())::float8 AS due_in_seconds,
                m.superseded_by,
                m.skip_reason,
                m.last_error
            FROM pgoutbox.message AS m
            WHERE %(all)s OR m.id = ANY (%(ids)s)
            ORDER BY m.id
            """,
            {"all": not message_ids, "ids": list(message_ids)},
        )
        return cursor.fetchall()


def state_of(connection: psycopg.Connection, message_id: int) -> str:
    """The state of one message."""
    return row_of(connection, message_id).state


def attempts_of(connection: psycopg.Connection, message_id: int) -> list[tuple[int, str, str | None]]:
    """The history of one message: number, outcome and error of each attempt that is recorded."""
    return connection.execute(
        "SELECT attempt_count, outcome, error FROM pgoutbox.attempt WHERE message_id = %s ORDER BY attempt_count",
        [message_id],
    ).fetchall()


# --- workers ----------------------------------------------------------------------------------------------------------

# A test that hangs fails after this time. No test passes or fails by how fast something is.
PATIENCE_SECONDS = 30.0


def settings_for(dsn: str, **overrides: object) -> Settings:
    """Settings of a worker that only a ring, an end or a due time wakes: the sweep is an hour away."""
    values: dict[str, object] = {
        "dsn": dsn,
        "sweep_seconds": 3600,
        "maintenance_interval_seconds": 0,
        "concurrency": 4,
        "batch_size": 50,
        "shutdown_grace_seconds": 5,
    }
    return load_settings(**values | overrides)


class WatchedWorker(Worker):
    """A worker that tells when it has nothing left to do: `asleep` is set when nothing has woken it yet.

    `sleeping` is set when, besides, it has asked until when it may sleep. What comes then has to wake it.
    """

    asleep: asyncio.Event
    sleeping: asyncio.Event

    async def run(self) -> None:
        """Run, with new events."""
        self.asleep = asyncio.Event()
        self.sleeping = asyncio.Event()
        await super().run()

    async def falls_asleep(self) -> None:
        """Return when it sleeps anew."""
        self.asleep.clear()
        self.sleeping.clear()
        await self.sleeping.wait()

    async def _sleep_long(self, limit: float) -> None:
        if not self._wake.is_set():
            self.asleep.set()
        await super()._sleep_long(limit)

    async def _sleep(self, seconds: float) -> bool:
        if self.asleep.is_set() and not self._wake.is_set():
            self.sleeping.set()
        return await super()._sleep(seconds)


def stumble(message: Message) -> None:
    """Fail now and then, at another attempt of each message: for good twice in ten, for a while once."""
    match (message.id * 7 + message.attempt_count) % 10:
        case 0 | 1:
            raise Permanent("no")
        case 2:
            raise Transient("busy")


@contextlib.asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[None]:
    """The worker at work. At the end it is stopped, and an error that it ended with is raised."""
    task = asyncio.create_task(worker.run())
    await asyncio.sleep(0)  # Its first step makes what a test may ask of it.
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield
    finally:
        worker.stop()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await task


async def drained(*outboxes: Outbox) -> None:
    """Workers of these have nothing left to do, all at once."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(Worker(outbox).drain() for outbox in outboxes))


class Reports(logging.Handler):
    """The events that workers report in their log, to be waited for."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.events: list[str] = []
        self._heard = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Note an event, from whatever thread it is reported."""
        self.events.append(getattr(record, "event", ""))
        self._loop.call_soon_threadsafe(self._heard.set)

    async def wait_for(self, event: Event) -> None:
        """Return when the event has been reported."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while event not in self.events:
                self._heard.clear()
                await self._heard.wait()


@contextlib.contextmanager
def reports() -> Iterator[Reports]:
    """Listen to what workers report."""
    handler = Reports()
    logger = logging.getLogger("pgoutbox")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def first_of(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def ask_for_bells(
    connection: psycopg.Connection,
    *queues: str,
    topics: Sequence[str] = ("greet",),
    deputy_of: Sequence[str] = (),
) -> list[tuple[str, str, float | None]]:
    """Ask as the listener of a worker of these topics does, which is deputy of some queues."""
    return connection.execute(
        sql.ARM,
        {
            "queues": list(queues),
            "watch_keys": post_keys("watch", queues, topics),
            "deputy_keys": post_keys("deputy", queues, topics),
            "deputy_of": list(deputy_of),
        },
    ).fetchall()


async def until_blocked(db: psycopg.Connection, work: asyncio.Task[object]) -> None:
    """Return when a statement in this database waits for a lock, or the work that runs it has ended."""
    while not work.done():
        blocked = db.execute(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
        if blocked is not None:
            return
        await asyncio.sleep(0)
