"""Actions of tests on an outbox, by SQL on any connection and by the public API, and workers in the test's process.

They run beside any worker. The actions that run the worker's own statements are in `tests.support.worker_sql`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from pgoutbox.message import Message, Permanent, Transient
from pgoutbox.settings import Settings
from pgoutbox.worker import MultiWorker, Worker
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from datetime import datetime, timedelta

    import psycopg

    from pgoutbox import Outbox
    from pgoutbox.observability.events import LogEvent

LEASE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one message's row."""

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
    fair_key: str | None
    halts_key: bool | None
    max_delay: timedelta | None
    owner: str | None
    on_duplicate: str | None
    payload_version: int


def enqueue(
    connection: psycopg.Connection, topic: str = "greet", payload: object = None, **arguments: Unpack[Options]
) -> int:
    """Enqueue by the SQL function, and return the message id."""
    names = "".join(f", {name} => %({name})s" for name in arguments)
    call = f"SELECT pgoutbox.enqueue(%(topic)s, %(payload)s{names})"
    parameters = {"topic": topic, "payload": Jsonb(payload), **arguments}
    (message_id,) = connection.execute(call.encode(), parameters).fetchone() or (0,)
    return int(message_id)


def due_earlier(connection: psycopg.Connection, message_id: int, seconds: float) -> None:
    connection.execute(
        "UPDATE pgoutbox.message_live SET available_at = now() - make_interval(secs => %s) WHERE id = %s",
        [seconds, message_id],
    )


def cancel(connection: psycopg.Connection, message_id: int) -> str:
    """Cancel by the SQL function, and return its answer."""
    (answer,) = connection.execute("SELECT pgoutbox.cancel(%s)", [message_id]).fetchone() or ("",)
    return str(answer)


def redrive(connection: psycopg.Connection, message_id: int) -> bool:
    """Redrive one message. Return whether it was redriven."""
    rows = connection.execute("SELECT result FROM pgoutbox.redrive(ARRAY[%s]::bigint[])", [message_id]).fetchall()
    return rows == [("redriven",)]


def begin(
    connection: psycopg.Connection, message_id: int, *, worker: str = "worker-1", lease_seconds: float = LEASE_SECONDS
) -> None:
    """Put a message in flight without a claim statement, by a claim of its own. Its lease may have lapsed."""
    connection.execute(
        """
        WITH claim AS (
            INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
            SELECT clock_timestamp(), now() + make_interval(secs => %s), m.queue, %s, ARRAY[m.id]
            FROM pgoutbox.message_live AS m
            WHERE m.id = %s
            RETURNING worker, claimed_at, ids
        )
        UPDATE pgoutbox.message AS m
        SET state = 'sending',
            attempt_count = attempt_count + 1,
            lane = least(attempt_count, 1), -- With a fair key, it has got its turn.
            worker = c.worker,
            claimed_at = c.claimed_at,
            key_in_flight = coalesce(m.coalesce_key, m.ordering_key),
            finished_at = NULL
        FROM claim AS c
        WHERE m.id = ANY (c.ids)
        """,
        [lease_seconds, worker, message_id],
    )


def lapse(connection: psycopg.Connection, message_id: int) -> None:
    """Age the claim of an attempt in flight so that its lease has just ended, as if its worker had died."""
    connection.execute(
        """
        UPDATE pgoutbox.claim AS c
        SET lease_expires_at = now() - interval '1 ms'
        FROM pgoutbox.in_flight_view AS v
        WHERE v.id = %s AND c.worker = v.worker AND c.claimed_at = v.claimed_at
        """,
        [message_id],
    )


def make_due(connection: psycopg.Connection, *message_ids: int) -> None:
    """Age pending messages so that they are due."""
    connection.execute(
        "UPDATE pgoutbox.message_live SET available_at = now() - interval '1 ms'"
        " WHERE id = ANY (%s) AND state = 'pending'",
        [list(message_ids)],
    )


def expire(connection: psycopg.Connection, message_id: int) -> None:
    """Age a message so that it has expired."""
    connection.execute(
        "UPDATE pgoutbox.message_live SET expires_at = now() - interval '1 ms' WHERE id = %s", [message_id]
    )


def row_of(connection: psycopg.Connection, message_id: int) -> Row:
    """Return the row of one message."""
    (row,) = rows_of(connection, message_id)
    return row


def rows_of(connection: psycopg.Connection, *message_ids: int) -> list[Row]:
    """Return the rows of these messages, or of all, ordered by id."""
    with connection.cursor(row_factory=class_row(Row)) as cursor:
        cursor.execute(
            """
            SELECT
                m.id,
                m.state,
                m.attempt_count,
                m.max_attempts,
                m.worker,
                EXISTS (SELECT FROM pgoutbox.in_flight_view AS v WHERE v.id = m.id) AS is_leased,
                m.finished_at IS NOT NULL AS is_finished,
                EXISTS (
                    SELECT FROM pgoutbox.cancel_request AS c
                    WHERE c.message_id = m.id AND c.message_created_at = m.created_at
                ) AS is_cancel_requested,
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
    """Return the state of one message."""
    return row_of(connection, message_id).state


def attempts_of(connection: psycopg.Connection, message_id: int) -> list[tuple[int, str, str | None]]:
    """Return the history of one message: number, outcome and error of each recorded attempt."""
    return connection.execute(
        """
        SELECT a.attempt_count - a.times + n, a.outcome, a.error
        FROM pgoutbox.message AS m
        CROSS JOIN jsonb_populate_recordset(NULL::pgoutbox.attempt, m.attempts) AS a
        CROSS JOIN generate_series(1, a.times) AS n
        WHERE m.id = %s
        ORDER BY 1
        """,
        [message_id],
    ).fetchall()


# --- workers ----------------------------------------------------------------------------------------------------------

# A hanging test fails after this time. No test depends on speed.
PATIENCE_SECONDS = 90.0


def settings_for(dsn: str, **overrides: object) -> Settings:
    """Return settings of a worker that polls once an hour: only a ring, an outcome or a due time wakes it earlier."""
    values: dict[str, object] = {
        "dsn": dsn,
        "poll_interval_seconds": 3600,
        "maintenance_interval_seconds": 0,
        "concurrency": 4,
        "batch_size": 50,
        "shutdown_grace_seconds": 5,
    }
    return settings_with(**values | overrides)


def stumble(message: Message) -> None:
    """Fail some attempts, at different attempts of each message: two in ten permanently, one temporarily."""
    match (message.id * 7 + message.attempt_count) % 10:
        case 0 | 1:
            raise Permanent("no")
        case 2:
            raise Transient("busy")


@contextlib.asynccontextmanager
async def running(worker: Worker | MultiWorker) -> AsyncIterator[None]:
    """Run the worker. At the end stop it, and raise its error if it ended with one."""
    task = asyncio.create_task(worker.run())
    await asyncio.sleep(0)  # Its first step creates the parts that a test may use.
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield
    finally:
        worker.stop()
        _, late = await asyncio.wait([task], timeout=PATIENCE_SECONDS)
        for one in late:
            one.cancel()
        assert not late, "the worker did not stop"
        await task


async def drained(*outboxes: Outbox) -> None:
    """Wait until these workers are all idle at the same time."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(Worker(outbox).drain() for outbox in outboxes))


class Reports(logging.Handler):
    """The events that workers log, for tests to await."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.events: list[str] = []
        self.records: list[logging.LogRecord] = []
        self._heard = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Record an event from any thread."""
        self.events.append(getattr(record, "event", ""))
        self.records.append(record)
        self._loop.call_soon_threadsafe(self._heard.set)

    async def wait_for(self, event: LogEvent) -> None:
        """Wait until the event has been logged."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while event not in self.events:
                self._heard.clear()
                await self._heard.wait()


@contextlib.contextmanager
def reports() -> Iterator[Reports]:
    """Record the events that workers log."""
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
    """Wait until one of the events is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def until_blocked(db: psycopg.Connection, work: asyncio.Task[object]) -> None:
    """Wait until a statement in this database waits for a lock, or the task that runs it has ended."""
    while not work.done():
        blocked = db.execute(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
        if blocked is not None:
            return
        await asyncio.sleep(0)
