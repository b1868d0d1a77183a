"""Tests interleavings and errors, found in a review, that once lost a wake-up, an order, a worker or a session."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
import pytest

import pgoutbox.worker.run
from pgoutbox import Outbox
from pgoutbox.database import sql
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.kernel import statements
from pgoutbox.message import Message, Outcome, Permanent, Sent, State, Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.observability.health import reasons_not_ready
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from pgoutbox.worker.kernel_run import Link
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    enqueue,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.pooler import pooled
from tests.support.worker_sql import (
    Trip,
    WatchedWorker,
    around_trips,
    claim,
    claims,
    finish_sent,
    ids_in_flight,
    run_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgoutbox.kernel.seams import Row, Step
    from pgoutbox.transports import Content
    from tests.conftest import Server

MUCH_LATER = RetryPolicy.steps(3600, jitter=0)


class Receiver:
    """Records deliveries; `has_all` is set at the expected number."""

    def __init__(self, outbox: Outbox, *, count: int = 1) -> None:
        self.delivered: list[int] = []
        self.has_all = asyncio.Event()

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            self.delivered.append(message.id)
            if len(self.delivered) == count:
                self.has_all.set()


# --- wake-ups ---------------------------------------------------------------------------------------------------------


async def test_a_retry_after_a_short_delay_does_not_wait_for_the_next_poll(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    """When the attempt ends, the worker sleeps and expects nothing for the duration of the lease."""
    delivered = asyncio.Event()

    @outbox.handler("greet", retry=RetryPolicy.steps(0.01, jitter=0))
    async def greet(message: Message, ctx: Context) -> None:
        if message.attempt_count == 1:
            await worker.sleeping.wait()
            raise Transient("busy")
        delivered.set()

    message_id = enqueue(db)
    worker = WatchedWorker(outbox)
    async with running(worker):
        await delivered.wait()
    assert (state_of(db, message_id), row_of(db, message_id).attempt_count) == ("sent", 2)


@pytest.mark.slow
async def test_without_a_listener_a_backlog_is_processed_without_waiting_for_a_poll(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, listen=False, concurrency=4))
    ids = [enqueue(db) for _ in range(100)]
    receiver = Receiver(outbox, count=len(ids))
    async with running(Worker(outbox)):
        await receiver.has_all.wait()
    assert receiver.delivered == ids


async def test_a_message_due_between_the_last_claim_and_the_due_time_query_is_delivered(
    outbox: Outbox, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds pass between the two, and the message falls due in the middle."""

    async def ask_late(steps: Sequence[Step], trip: Trip) -> list[list[Row]]:
        asked = next((parameters for statement, parameters in steps if statement is statements.NEXT_DUE), None)
        if asked is None or receiver.has_all.is_set():
            return await trip(steps)
        db.execute("UPDATE pgoutbox.message_live SET available_at = now() - interval '5 s'")
        late = {name: cast("float", asked[name]) + 10 for name in ("since_seconds", "others_since_seconds")}
        return await trip([(text, {**values, **late} if values is asked else values) for text, values in steps])

    monkeypatch.setattr(Link, "trip", around_trips(ask_late))
    receiver = Receiver(outbox)
    message_id = enqueue(db)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 h'")
    async with running(Worker(outbox)):
        await receiver.has_all.wait()
    assert receiver.delivered == [message_id]


async def test_a_message_released_by_a_stopping_worker_wakes_another_worker(dsn: str, db: psycopg.Connection) -> None:
    stopping_outbox, outbox = Outbox(settings_for(dsn, shutdown_grace_seconds=0)), Outbox(settings_for(dsn))
    started = asyncio.Event()

    @stopping_outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        started.set()
        await asyncio.Event().wait()

    receiver = Receiver(outbox)
    message_id = enqueue(db)
    sleeper = WatchedWorker(outbox)
    async with contextlib.AsyncExitStack() as stack:
        async with running(Worker(stopping_outbox)):
            await started.wait()
            await stack.enter_async_context(running(sleeper))
            await sleeper.sleeping.wait()
        await receiver.has_all.wait()
    assert receiver.delivered == [message_id]


@pytest.mark.slow
async def test_a_drain_that_waits_for_another_workers_message_does_not_spin(
    outbox: Outbox, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgoutbox.worker.run, "_POLL_SECONDS", 0.01)
    claim_count = look_count = 0

    async def count(steps: Sequence[Step], trip: Trip) -> list[list[Row]]:
        nonlocal claim_count
        claim_count += claims(steps)
        return await trip(steps)

    fetch = WorkerConnection.fetch

    async def look(self: WorkerConnection, statement: Any, parameters: Any) -> Any:  # noqa: ANN401 - passed on
        nonlocal look_count
        look_count += statement is sql.COUNT_OWED
        if statement is sql.COUNT_OWED and look_count == 10:
            finish_sent(db, (foreign, 1), worker="another")
        return await fetch(self, statement, parameters)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if message.payload == "first":
            enqueue(db, payload="second", coalesce_key="k")

    foreign = enqueue(db)
    assert ids_in_flight(claim(db, worker="another")) == [foreign]
    enqueue(db, payload="first", coalesce_key="k")
    monkeypatch.setattr(Link, "trip", around_trips(count))
    monkeypatch.setattr(WorkerConnection, "fetch", look)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await Worker(outbox).drain()
    assert [row.state for row in rows_of(db)] == ["sent"] * 3
    assert look_count == 10
    assert claim_count <= 3 * look_count


# --- outcomes ---------------------------------------------------------------------------------------------------------


class BouncedError(Permanent):
    """An outcome that does not call its base."""

    def __init__(self, code: int) -> None:
        self.code = code


class UnprintableError(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _asked_to_wait(retry_after: object) -> Transient:
    outcome = Transient("busy")
    outcome.retry_after = cast("float", retry_after)
    return outcome


UNREADABLE: dict[str, tuple[Callable[[], Outcome], str, str]] = {
    "text for seconds": (
        lambda: Transient("busy", retry_after=cast("float", "soon")),
        "pending",
        "ValueError: could not convert string to float: 'soon'",
    ),
    "more seconds than a float holds": (
        lambda: Transient("busy", retry_after=10**400),
        "pending",
        "OverflowError: int too large to convert to float",
    ),
    "text set afterwards": (lambda: _asked_to_wait("soon"), "failed", "the outcome cannot be read: TypeError: "),
    "too much set afterwards": (
        lambda: _asked_to_wait(10**400),
        "failed",
        "the outcome cannot be read: OverflowError: ",
    ),
    "a base that was not called": (lambda: BouncedError(550), "failed", "the outcome cannot be read: "),
    "an error that cannot be printed": (
        lambda: Permanent(cast("str", UnprintableError())),
        "failed",
        "the outcome cannot be read: RuntimeError: no text",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
async def test_an_unreadable_outcome_ends_only_its_own_message(
    outbox: Outbox, db: psycopg.Connection, name: str
) -> None:
    make, state, error = UNREADABLE[name]

    @outbox.handler("greet", retry=MUCH_LATER)
    async def greet(message: Message, ctx: Context) -> Outcome:
        return make() if message.payload == "bad" else Sent()

    before, bad, after = enqueue(db), enqueue(db, payload="bad"), enqueue(db)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db, before, bad, after)] == ["sent", state, "sent"]
    assert (row_of(db, bad).last_error or "").startswith(error)


HOLDS = "outcome unknown"


async def test_a_timed_out_attempt_is_held_if_the_handler_requests_it(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet", on_unknown="hold", timeout=0.05)
    async def greet(message: Message, ctx: Context) -> None:
        await asyncio.Event().wait()

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.attempt_count) == ("failed", 1)
    assert HOLDS in (row.last_error or "")


async def test_an_attempt_stopped_with_its_worker_is_held_if_the_handler_requests_it(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, shutdown_grace_seconds=0))
    started = asyncio.Event()

    @outbox.handler("greet", on_unknown="hold")
    async def greet(message: Message, ctx: Context) -> None:
        started.set()
        await asyncio.Event().wait()

    message_id = enqueue(db)
    async with running(Worker(outbox)):
        await started.wait()
    row = row_of(db, message_id)
    assert (row.state, row.attempt_count) == ("failed", 1)
    assert HOLDS in (row.last_error or "")


class Letter:
    """An example content."""

    scheme = "letter"


class StuckTransport:
    """A transport that sends immediately, but hangs at the first attempt of one message."""

    schemes = ("letter",)

    def __init__(self, stuck_id: int) -> None:
        self.sent: list[int] = []
        self.is_stuck = asyncio.Event()
        self._stuck_id = stuck_id

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Send, or wait without end."""
        if message.id == self._stuck_id and not self.is_stuck.is_set():
            self.is_stuck.set()
            await asyncio.Event().wait()
        self.sent.append(message.id)
        return Sent()

    async def aclose(self) -> None:
        """Do nothing: this transport keeps nothing open."""


async def test_sent_messages_of_a_timed_out_batch_stay_sent_and_the_rest_is_retried(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    # The event loop does not run before the transport hangs, so the timeout cannot come earlier.
    @outbox.batch_handler("index", timeout=0.5, retry=MUCH_LATER)
    async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> Sequence[Outcome]:
        return cast("Sequence[Outcome]", [Letter() for _ in messages])

    ids = [enqueue(db, topic="index") for _ in range(4)]
    transport = StuckTransport(ids[2])
    async with asyncio.timeout(PATIENCE_SECONDS):
        await Worker(outbox, transports={"letter": transport}).run_once()
    assert transport.sent == [ids[0], ids[1], ids[3]]
    rows = [(row.state, row.attempt_count) for row in rows_of(db, *ids)]
    assert rows == [("sent", 1), ("sent", 1), ("pending", 1), ("sent", 2)]
    assert HOLDS in (row_of(db, ids[2]).last_error or "")


async def test_sent_messages_of_a_stopped_batch_stay_sent_and_the_rest_is_pending(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, shutdown_grace_seconds=0))

    @outbox.batch_handler("index", retry=MUCH_LATER)
    async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> Sequence[Outcome]:
        return cast("Sequence[Outcome]", [Letter() for _ in messages])

    ids = [enqueue(db, topic="index") for _ in range(4)]
    transport = StuckTransport(ids[2])
    async with running(Worker(outbox, transports={"letter": transport})):
        await transport.is_stuck.wait()
    assert transport.sent == ids[:2]
    assert [row.state for row in rows_of(db, *ids)] == ["sent", "sent", "pending", "pending"]


# --- coalescing -------------------------------------------------------------------------------------------------------


# --- sessions ---------------------------------------------------------------------------------------------------------

LOOK_AT_SESSION = "SELECT current_setting('statement_timeout'), current_setting('search_path')"
CHANGE_SESSION = "SET statement_timeout = '54321ms'; SET search_path = nowhere"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_session_settings_of_a_transactional_handler_do_not_reach_the_next_one(
    dsn: str, db: psycopg.Connection, kind: str
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1))
    seen: list[tuple[int, bool, object]] = []

    if kind == "async":

        @outbox.handler("greet", transactional=True, retry=MUCH_LATER)
        async def greet(message: Message, ctx: Context) -> None:
            connection = ctx.connection
            looked = await (await connection.execute(LOOK_AT_SESSION)).fetchone()
            seen.append((connection.info.backend_pid, connection.autocommit, looked))
            if message.payload == "autocommit":
                await connection.rollback()
                await connection.set_autocommit(True)
            await connection.execute(CHANGE_SESSION)

    else:

        @outbox.handler("greet", transactional=True, retry=MUCH_LATER)
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            connection = ctx.connection
            looked = connection.execute(LOOK_AT_SESSION).fetchone()
            seen.append((connection.info.backend_pid, connection.autocommit, looked))
            if message.payload == "autocommit":
                connection.rollback()
                connection.autocommit = True
            connection.execute(CHANGE_SESSION)

    ids = [enqueue(db, payload=payload) for payload in ("autocommit", "transaction", "transaction")]
    await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db, *ids)] == ["pending", "sent", "sent"]
    (pid, _, _), *_ = seen
    assert seen == [(pid, False, db.execute(LOOK_AT_SESSION).fetchone())] * 3


HOSTILE: dict[str, str] = {
    "no attempts": "INSERT INTO pgoutbox.message_live (topic, payload, max_attempts) VALUES ('greet', '1', 0)",
    "no attempts left": "INSERT INTO pgoutbox.message_live (topic, payload, attempt_budget) VALUES ('greet', '1', 0)",
    "created before our era": (
        "INSERT INTO pgoutbox.message_live (topic, payload, created_at) VALUES ('greet', '1', '4000-01-01 BC')"
    ),
    "created never": "INSERT INTO pgoutbox.message_live (topic, payload, created_at) VALUES ('greet', '1', 'infinity')",
    "due before our era": (
        "INSERT INTO pgoutbox.message_live (topic, payload, available_at) VALUES ('greet', '1', '4000-01-01 BC')"
    ),
    "due never": "INSERT INTO pgoutbox.message_live (topic, payload, available_at) VALUES ('greet', '1', 'infinity')",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_row_that_no_worker_can_read_is_refused_even_for_manual_writes(
    rolled_back: psycopg.Connection, name: str
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        rolled_back.execute(HOSTILE[name].encode())
    assert caught.value.diag.constraint_name == "message_live_sound"


BELLS: Final = """
    SELECT l.pid
    FROM pg_locks AS l
    JOIN pg_database AS d ON d.oid = l.database AND d.datname = current_database()
    WHERE l.locktype = 'advisory' AND l.classid = 1885826146 AND l.mode = 'ExclusiveLock'
"""


def session_of_pool(pooled_dsn: str) -> tuple[int, list[tuple[str, str]], list[tuple[str]], list[tuple[str]]]:
    """Return the pool's session: its process number, settings, prepared statements and channels.

    A session that listens but has no client holds back the notification queue of the whole server.
    """
    with psycopg.connect(pooled_dsn, prepare_threshold=None, application_name="pgoutbox test") as connection:
        ((pid,),) = connection.execute("SELECT pg_backend_pid()").fetchall()
        settings = connection.execute(
            "SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY name"
        ).fetchall()
        channels = connection.execute("SELECT pg_listening_channels()").fetchall()
        return pid, settings, connection.execute("SELECT name FROM pg_prepared_statements").fetchall(), channels


async def test_a_listener_behind_a_pooler_logs_a_warning_and_leaves_no_session_settings(
    pooled_dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(pooled_dsn, poll_interval_seconds=0.1))
    receiver, worker = Receiver(outbox), WatchedWorker(outbox)
    before = session_of_pool(pooled_dsn)
    async with running(worker):
        await worker.sleeping.wait()
        message_id = enqueue(db)
        await receiver.has_all.wait()
        assert (status := worker.status()).is_listener_up is None
        assert reasons_not_ready(status, poll_interval_seconds=3600) == []
        # A bell in a session of the pool would outlive a killed worker.
        assert db.execute(BELLS).fetchall() == []
        assert await asyncio.to_thread(session_of_pool, pooled_dsn) == before
    assert session_of_pool(pooled_dsn) == before
    assert state_of(db, message_id) == State.SENT
    assert worker.telemetry.counts[LogEvent.LISTENER_POOLED] == 1


async def test_behind_a_session_pooler_a_worker_listens_and_prepares_no_statements(
    dsn: str, server: Server, db: psycopg.Connection
) -> None:
    with pooled(dsn, server, mode="session", size=10) as pooled_dsn:
        outbox = Outbox(settings_for(pooled_dsn))
        receiver, worker = Receiver(outbox), WatchedWorker(outbox)
        async with running(worker):
            await worker.sleeping.wait()
            doorbell = run_of(worker).doorbell
            assert doorbell is not None
            for _ in range(6):  # By default, the driver prepares a statement after five executions.
                await doorbell._ask((statements.HEARTBEAT, {}))
            assert await doorbell._ask(("SELECT name FROM pg_prepared_statements", {})) == [[]]
            message_id = enqueue(db)
            await receiver.has_all.wait()
    assert state_of(db, message_id) == State.SENT


async def test_a_separate_listener_wakes_a_worker_behind_a_pooler_at_a_commit(
    dsn: str, pooled_dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOUTBOX_LISTEN_DSN", dsn)
    outbox = Outbox(settings_for(pooled_dsn))
    receiver, worker = Receiver(outbox), WatchedWorker(outbox)
    before = session_of_pool(pooled_dsn)
    async with running(worker):
        await worker.sleeping.wait()
        message_id = enqueue(db)
        await receiver.has_all.wait()
    assert session_of_pool(pooled_dsn) == before
    assert state_of(db, message_id) == State.SENT
    assert worker.telemetry.counts[LogEvent.LISTENER_POOLED] == 0
