"""Tests the worker on a real database: the result for a message, for any behaviour of its handler, process or
server."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import logging
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import psycopg
import psycopg.sql
import pytest

from pgoutbox import Email, Outbox, Topic
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.errors import ConfigurationError, LeaseLostError
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.kernel import lanes, statements
from pgoutbox.message import Message, Outcome, Permanent, Sent, Skip, Snooze, State, Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.operations import Operator, Rate
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from pgoutbox.worker.beside.failure_alerts import FailureAlerts
from pgoutbox.worker.beside.maintenance import Maintenance
from pgoutbox.worker.beside.presence import Presence
from pgoutbox.worker.kernel_run import Link
from pgoutbox.worker.transactional.handler_session import HandlerSession
from tests.support.held import Held
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    Options,
    attempts_of,
    cancel,
    enqueue,
    expire,
    lapse,
    reports,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
    until_blocked,
)
from tests.support.waiting import until, until_idle
from tests.support.worker_sql import (
    Trip,
    WatchedWorker,
    around_trips,
    claim,
    claim_ordered,
    claims,
    ids_in_flight,
    run_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from pgoutbox.kernel.seams import Row, Step
    from tests.conftest import Connect, Server

AT_ONCE = RetryPolicy.steps(0, jitter=0)
MUCH_LATER = RetryPolicy.steps(3600, jitter=0)


# --- outcomes ---------------------------------------------------------------------------------------------------------


async def test_a_message_is_delivered_once_and_ends_sent(outbox: Outbox, db: psycopg.Connection) -> None:
    delivered: list[Message] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.append(message)

    message_id = enqueue(db, payload={"name": "Ann"}, destination="mailto:ann@example.org")
    worker = Worker(outbox)
    await worker.run_once()
    (message,) = delivered
    assert (message.id, message.payload, message.destination) == (message_id, {"name": "Ann"}, "mailto:ann@example.org")
    assert (message.attempt_count, message.max_attempts, dict(message.headers)) == (1, 11, {})
    row = row_of(db, message_id)
    assert (row.state, row.worker, attempts_of(db, message_id)) == ("sent", worker.name, [])
    assert worker.telemetry.counts[LogEvent.SENT] == 1


OUTCOMES: dict[str, Transient | Permanent | Skip | Snooze] = {
    "busy": Transient("busy"),
    "asked to wait": Transient("busy", retry_after=60),
    "refused": Permanent("refused"),
    "unsubscribed": Skip("unsubscribed"),
    "not yet": Snooze(3600),
}


@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_an_outcome_is_written_whether_it_is_returned_or_raised(
    outbox: Outbox, db: psycopg.Connection, kind: str, raised: bool
) -> None:
    def decide(message: Message) -> Outcome:
        outcome = OUTCOMES[str(message.payload)]
        if raised:
            raise outcome
        return outcome

    if kind == "async":

        @outbox.handler("greet", retry=MUCH_LATER)
        async def greet(message: Message, ctx: Context) -> Outcome:
            return decide(message)

    else:

        @outbox.handler("greet", retry=MUCH_LATER)
        def greet_in_thread(message: Message, ctx: SyncContext) -> Outcome:
            return decide(message)

    ids = [enqueue(db, payload=name) for name in OUTCOMES]
    await Worker(outbox).run_once()
    rows = rows_of(db, *ids)
    assert [(row.state, row.last_error, row.skip_reason, row.max_attempts) for row in rows] == [
        ("pending", "busy", None, 11),
        ("pending", "busy", None, 11),
        ("failed", "refused", None, 11),
        ("skipped", None, "unsubscribed", 11),
        ("pending", None, None, 12),
    ]
    assert [round(row.due_in_seconds / 3600) for row in rows] == [1, 0, 0, 0, 1]


async def test_an_exception_is_retried_unless_it_is_listed_as_permanent(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet", retry=MUCH_LATER, permanent=[LookupError])
    async def greet(message: Message, ctx: Context) -> None:
        raise KeyError("who") if message.payload == "permanent" else ValueError("what")

    passing, permanent = enqueue(db, payload="passing"), enqueue(db, payload="permanent")
    await Worker(outbox).run_once()
    assert [(row.state, row.last_error) for row in rows_of(db, passing, permanent)] == [
        ("pending", "ValueError: what"),
        ("failed", "KeyError: 'who'"),
    ]


async def test_a_message_is_retried_until_its_attempts_are_used_up(outbox: Outbox, db: psycopg.Connection) -> None:
    seen: list[int] = []

    @outbox.handler("greet", retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> None:
        seen.append(message.attempt_count)
        raise Transient(f"busy {message.attempt_count}")

    message_id = enqueue(db, max_attempts=3)
    await Worker(outbox).drain()
    assert seen == [1, 2, 3]
    assert state_of(db, message_id) == State.FAILED
    assert attempts_of(db, message_id) == [(1, "retry", "busy 1"), (2, "retry", "busy 2"), (3, "failed", "busy 3")]


@pytest.mark.slow
async def test_each_message_of_a_fan_out_has_its_own_outcome(outbox: Outbox, db: psycopg.Connection) -> None:
    contents: list[object] = []

    @outbox.handler("relay", retry=MUCH_LATER)
    async def relay(message: Message, ctx: Context) -> None:
        contents.append(message.content)
        match message.destination:
            case "mailto:refused@example.org":
                raise Permanent("550 no such user")
            case "mailto:greylisted@example.org":
                raise Transient("451 greylisted")

    recipients = [f"mailto:{name}@example.org" for name in ("ann", "refused", "greylisted")]
    with db.transaction():
        ids = outbox.on(db).enqueue_fanout("relay", None, recipients, content="hello").ids
    await Worker(outbox).run_once()
    assert contents == ["hello"] * 3
    rows = rows_of(db, *ids)
    assert [(row.state, row.last_error) for row in rows] == [
        ("sent", None),
        ("failed", "550 no such user"),
        ("pending", "451 greylisted"),
    ]


async def test_each_topic_has_its_own_pauses(outbox: Outbox, db: psycopg.Connection) -> None:
    outbox.define(Topic("urgent", retry=RetryPolicy.steps(3600, jitter=0)))
    outbox.define(Topic("patient", retry=RetryPolicy.steps(360_000, jitter=0)))

    @outbox.handler("urgent")
    @outbox.handler("patient")
    async def fail(message: Message, ctx: Context) -> None:
        raise Transient("busy")

    urgent, patient = enqueue(db, "urgent"), enqueue(db, "patient")
    await Worker(outbox).run_once()
    assert row_of(db, urgent).due_in_seconds <= 3600
    assert row_of(db, patient).due_in_seconds > 180_000
    assert [row.attempt_count for row in rows_of(db, urgent, patient)] == [1, 1]


async def test_a_message_claimed_again_before_its_finish_is_answered_is_handed_over_again(
    outbox: Outbox, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    @outbox.handler("greet", retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> Outcome:
        seen.append(message.attempt_count)
        return Transient("busy") if message.attempt_count == 1 else Sent()

    async def finish_slowly(steps: Sequence[Step], trip: Trip) -> list[list[Row]]:
        results = await trip(steps)
        if any(statement is statements.FINISH for statement, _ in steps):
            # As if it had asked for due retries before the finish was committed.
            run_of(worker).kernel.sweep()
        return results

    monkeypatch.setattr(Link, "trip", around_trips(finish_slowly))
    message_id = enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: state_of(db, message_id) == State.SENT)
    assert seen == [1, 2]


async def test_a_drain_waits_for_retries_but_not_for_scheduled_messages(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet", retry=RetryPolicy.steps(0.05, jitter=0))
    async def greet(message: Message, ctx: Context) -> None:
        if message.attempt_count < 3:
            raise Transient("busy")

    retried, scheduled = enqueue(db), enqueue(db)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 h' WHERE id = %s", [scheduled])
    await Worker(outbox).drain()
    assert [(row.state, row.attempt_count) for row in rows_of(db, retried, scheduled)] == [("sent", 3), ("pending", 0)]


@pytest.mark.slow
async def test_a_drain_delivers_messages_that_another_worker_releases(dsn: str, db: psycopg.Connection) -> None:
    claimed, give_back = asyncio.Event(), asyncio.Event()

    def outbox(*, gives_back: bool) -> Outbox:
        made = Outbox(settings_for(dsn))

        @made.handler("greet", retry=AT_ONCE)
        async def greet(message: Message, ctx: Context) -> None:
            if gives_back:
                claimed.set()
                await give_back.wait()
                worker.stop()
                raise Transient("busy")

        return made

    message_id = enqueue(db)
    worker = WatchedWorker(outbox(gives_back=True))
    async with running(worker):
        await claimed.wait()
        drain = asyncio.create_task(Worker(outbox(gives_back=False)).drain())
        await until_idle_in(db, "WITH paused")
        give_back.set()
        async with asyncio.timeout(PATIENCE_SECONDS / 2):
            await drain
    assert state_of(db, message_id) == State.SENT


async def until_idle_in(db: psycopg.Connection, statement: str) -> None:
    """Wait until the last statement that a worker's claim connection has completed begins with this text."""
    asked = (
        "SELECT count(*) FILTER (WHERE ltrim(query, E'\\n') LIKE %s AND state = 'idle') FROM pg_stat_activity "
        "WHERE datname = current_database() AND starts_with(application_name, 'pgoutbox claim')"
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        idle_count = 0
        while idle_count < 2:
            await asyncio.sleep(0)
            (idle_count,) = db.execute(asked, [statement + "%"]).fetchone() or (0,)


async def test_an_expired_message_is_not_handed_over(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        raise AssertionError("an expired message was handed over")

    message_id = enqueue(db)
    expire(db, message_id)
    worker = Worker(outbox)
    await worker.run_once()
    assert row_of(db, message_id).skip_reason == "expired"
    assert worker.telemetry.counts[LogEvent.SKIPPED] == 1


async def test_a_topic_without_a_handler_is_left_to_another_worker(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    unknown, known = enqueue(db, topic="unknown"), enqueue(db)
    await Worker(outbox).drain()
    assert [(row.state, row.attempt_count) for row in rows_of(db, unknown, known)] == [("pending", 0), ("sent", 1)]


@pytest.mark.slow
async def test_an_unknown_outcome_is_held_if_the_handler_requests_it(outbox: Outbox, db: psycopg.Connection) -> None:
    delivered: list[str] = []

    @outbox.handler("pay", on_unknown="hold")
    async def pay(message: Message, ctx: Context) -> None:
        delivered.append(message.topic)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.append(message.topic)

    held, retried = enqueue(db, topic="pay"), enqueue(db, topic="greet")
    claim(db, topics=["pay", "greet"], worker="dead")
    lapse(db, held)
    lapse(db, retried)
    worker = Worker(outbox)
    await worker.run_once()
    assert delivered == ["greet"]
    assert [row.state for row in rows_of(db, held, retried)] == ["failed", "sent"]
    assert "outcome unknown" in (row_of(db, held).last_error or "")
    assert worker.telemetry.counts[LogEvent.LEASE_EXPIRED] == 1


@pytest.mark.slow
async def test_two_concurrent_runs_share_the_work(outbox: Outbox, db: psycopg.Connection) -> None:
    delivered: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.append(message.id)

    ids = [enqueue(db) for _ in range(200)]
    await asyncio.gather(*(Worker(outbox).run_once() for _ in range(3)))
    assert sorted(delivered) == ids


@pytest.mark.slow
async def test_messages_that_wait_for_slow_handlers_go_to_an_idle_worker(dsn: str, db: psycopg.Connection) -> None:
    first, second = Outbox(settings_for(dsn, concurrency=2)), Outbox(settings_for(dsn, concurrency=50))
    may_end = asyncio.Event()
    kept: set[int] = set()
    helped: set[int] = set()

    @first.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if message.payload == "slow":
            kept.add(message.id)
            await may_end.wait()

    @second.handler("greet")
    async def help_out(message: Message, ctx: Context) -> None:
        helped.add(message.id)

    with db.transaction():
        for _ in range(500):
            enqueue(db, payload="fast")
        slow = [enqueue(db, payload="slow") for _ in range(40)]
    hoarder = Worker(first)
    async with running(hoarder):
        await until(lambda: len(kept) == 2 and sum(row.state == "sending" for row in rows_of(db, *slow)) > 2)
        hoarded = sum(row.state == "sending" for row in rows_of(db, *slow)) - 2
        async with running(Worker(second)):
            await until(lambda: len(helped) == 38)
        assert (kept | helped, len(kept)) == ({*slow}, 2)
        assert hoarder.telemetry.counts[LogEvent.RELEASED] >= hoarded
        may_end.set()
        await until(lambda: {row.state for row in rows_of(db, *slow)} == {"sent"})


@pytest.mark.slow
async def test_waiting_messages_are_released_unless_a_second_claim_would_take_a_second_token(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1))
    may_end = asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if message.id > last_fast_id:
            await may_end.wait()

    Operator(db).limit_rate("limited", Rate(1000, 1))
    # After messages that end at once, it claims ahead.
    last_fast_id = max(enqueue(db) for _ in range(50))
    worker = WatchedWorker(outbox, queues=["default", "limited"])
    async with running(worker):
        await until(lambda: state_of(db, last_fast_id) == "sent")
        await worker.sleeping.wait()
        with db.transaction():
            ids = [enqueue(db, queue=queue) for queue in ("default", "default", "limited", "limited")]
        await until(lambda: len(run_of(worker).state.in_flight) == len(ids))
        await until(lambda: state_of(db, ids[1]) == "pending")
        assert [state_of(db, message_id) for message_id in ids[2:]] == ["sending", "sending"]
        may_end.set()
        await until(lambda: {row.state for row in rows_of(db, *ids)} == {"sent"})


def test_a_worker_without_handlers_is_refused(outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="no handlers"):
        Worker(outbox)


# --- queues -----------------------------------------------------------------------------------------------------------


async def delivery_order(dsn: str, db: psycopg.Connection, queues: Sequence[str], counts: dict[str, int]) -> list[str]:
    """Return the queues of the messages in the order in which one slot, claiming one by one, delivered them."""
    outbox = Outbox(settings_for(dsn, concurrency=1, batch_size=1))
    order: list[str] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        order.append(message.queue)

    for queue, count in counts.items():
        for _ in range(count):
            enqueue(db, queue=queue)
    await Worker(outbox, queues=queues).run_once()
    return order


async def test_a_queue_outside_the_workers_list_is_not_served(dsn: str, db: psycopg.Connection) -> None:
    assert await delivery_order(dsn, db, ["critical"], {"bulk": 1, "critical": 1}) == ["critical"]


# --- threads and timeouts ---------------------------------------------------------------------------------------------


async def test_sync_handlers_run_in_parallel_threads(outbox: Outbox, db: psycopg.Connection) -> None:
    together = threading.Barrier(4, timeout=PATIENCE_SECONDS)
    names: list[str] = []

    @outbox.handler("greet")
    def greet(message: Message, ctx: SyncContext) -> None:
        together.wait()
        names.append(threading.current_thread().name)

    ids = [enqueue(db) for _ in range(4)]
    await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db, *ids)] == ["sent"] * 4
    assert all(name.startswith("pgoutbox-handler") for name in names)


async def test_an_async_handler_is_cancelled_at_its_timeout_and_retried(outbox: Outbox, db: psycopg.Connection) -> None:
    cancelled: list[int] = []

    @outbox.handler("greet", timeout=0.05, retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> None:
        if message.attempt_count == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.id)
                raise

    message_id = enqueue(db)
    await Worker(outbox).drain()
    assert cancelled == [message_id]
    assert state_of(db, message_id) == State.SENT
    assert attempts_of(db, message_id) == [(1, "retry", "timed out after 0.05 s, outcome unknown")]


@dataclass(frozen=True, slots=True)
class Stuck:
    """An outbox whose handler for `greet` stays in its thread for messages with this payload."""

    outbox: Outbox
    let_go: threading.Event
    calls: list[int]

    async def pass_timeout(self, worker: Worker, *, seconds_ago: float = 0) -> None:
        """Let the timeout of the stuck handler pass: a short one might pass before the thread begins."""
        await until(lambda: self.calls)
        pool = run_of(worker).pool
        (slot,) = pool._slots
        slot.deadline = asyncio.get_running_loop().time() - seconds_ago
        pool._end_overdue()


def stuck(dsn: str, **settings: object) -> Stuck:
    """See `Stuck`."""
    made = Stuck(Outbox(settings_for(dsn, **settings)), threading.Event(), [])

    @made.outbox.handler("greet", timeout=3600, retry=MUCH_LATER)
    def greet(message: Message, ctx: SyncContext) -> None:
        made.calls.append(message.id)
        if message.payload == "stuck":
            made.let_go.wait(PATIENCE_SECONDS)

    return made


async def test_a_late_success_of_a_thread_past_its_timeout_is_recorded_as_sent(
    dsn: str, db: psycopg.Connection
) -> None:
    made = stuck(dsn)
    message_id = enqueue(db, payload="stuck")
    worker = Worker(made.outbox)
    with reports() as heard:
        async with running(worker):
            await made.pass_timeout(worker)
            await heard.wait_for(LogEvent.ATTEMPT_OVERDUE)
            made.let_go.set()
            await until(lambda: state_of(db, message_id) == State.SENT)
    assert (attempts_of(db, message_id), made.calls) == ([], [message_id])
    assert worker.telemetry.counts[LogEvent.ATTEMPT_ABANDONED] == 0


async def test_a_thread_whose_process_was_suspended_past_its_timeout_may_still_succeed(
    dsn: str, db: psycopg.Connection
) -> None:
    made = stuck(dsn)
    message_id = enqueue(db, payload="stuck")
    worker = Worker(made.outbox)
    with reports() as heard:
        async with running(worker):
            await made.pass_timeout(worker)
            await heard.wait_for(LogEvent.ATTEMPT_OVERDUE)
            await made.pass_timeout(worker, seconds_ago=3600)  # The process was suspended.
            made.let_go.set()
            await until(lambda: state_of(db, message_id) != State.SENDING)
    assert (state_of(db, message_id), attempts_of(db, message_id)) == (State.SENT, [])


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
async def test_a_transactional_handler_does_not_begin_after_waiting_past_its_lease(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, *, is_sync: bool
) -> None:
    outbox = Outbox(settings_for(dsn))
    calls: list[int] = []
    if is_sync:

        @outbox.handler("greet", transactional=True)
        def greet(message: Message, ctx: SyncContext) -> None:
            calls.append(message.id)
    else:

        @outbox.handler("greet", transactional=True)
        async def agreet(message: Message, ctx: Context) -> None:
            calls.append(message.id)

    message_id = enqueue(db)
    worker = Worker(outbox)

    def pass_the_lease() -> None:
        with db.transaction():  # Or this worker would claim the message again.
            lapse(db, message_id)
            claim(db, worker="another")
        # The last step: the lease keeper would renew an old lease.
        run_of(worker).state.in_flight[message_id].leased_at -= 3600

    async def begin(session: HandlerSession, name: str, *, seconds: float) -> None:
        await begin_at_once(session, name, seconds=seconds)
        pass_the_lease()

    begin_at_once = HandlerSession.begin
    monkeypatch.setattr(HandlerSession, "begin", begin)
    with reports() as heard:
        async with running(worker):
            await heard.wait_for(LogEvent.LEASE_LOST)
    assert calls == []
    row = row_of(db, message_id)
    assert (row.state, row.attempt_count, row.worker) == (State.SENDING, 2, "another")


@pytest.mark.parametrize("keyed", [Options(coalesce_key="k"), Options(ordering_key="k")], ids=["coalesce", "order"])
async def test_no_newer_message_of_its_key_starts_beside_a_thread_past_its_timeout(
    dsn: str, db: psycopg.Connection, keyed: Options
) -> None:
    made = stuck(dsn)
    older = enqueue(db, payload="stuck", **keyed)
    worker = Worker(made.outbox)
    with reports() as heard:
        async with running(worker):
            await made.pass_timeout(worker)
            await heard.wait_for(LogEvent.ATTEMPT_OVERDUE)
            newer = enqueue(db, **keyed)
            other = enqueue(db)
            await until(lambda: state_of(db, other) == State.SENT)
            assert [row.state for row in rows_of(db, older, newer)] == [State.SENDING, State.PENDING]
            made.let_go.set()
            await until(lambda: state_of(db, newer) == State.SENT)
    assert state_of(db, older) == State.SENT
    assert [i for i in made.calls if i != other] == [older, newer]


@pytest.mark.slow
async def test_a_message_in_a_thread_past_the_grace_period_stays_until_its_lease_ends(
    dsn: str, db: psycopg.Connection
) -> None:
    made = stuck(dsn, shutdown_grace_seconds=0)
    message_id = enqueue(db, payload="stuck")
    worker = Worker(made.outbox)
    try:
        with reports() as heard:
            async with running(worker):
                await made.pass_timeout(worker)
                await heard.wait_for(LogEvent.ATTEMPT_OVERDUE)
            assert heard.events.count(LogEvent.ATTEMPT_ABANDONED) == 1
        assert claim(db) == []
        assert (state_of(db, message_id), attempts_of(db, message_id)) == (State.SENDING, [])
        lapse(db, message_id)
        assert ids_in_flight(claim(db)) == [message_id]
    finally:
        made.let_go.set()


@pytest.mark.slow
async def test_an_attempt_ends_even_if_its_handler_ignores_its_cancellation(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, lease_seconds=1))
    may_end = asyncio.Event()

    @outbox.handler("greet", timeout=0.05, retry=MUCH_LATER)
    async def greet(message: Message, ctx: Context) -> None:
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()

    message_id = enqueue(db)
    worker = Worker(outbox)
    with reports() as heard:
        async with running(worker):
            await heard.wait_for(LogEvent.RETRY)
            assert attempts_of(db, message_id) == [(1, "retry", "timed out after 0.05 s, outcome unknown")]
            assert worker.status().abandoned == 1
            may_end.set()
            await until(lambda: worker.status().abandoned == 0)
    assert state_of(db, message_id) == State.PENDING


async def test_the_timeout_in_the_settings_applies_to_handlers_without_their_own(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, handler_timeout_seconds=0.05))

    @outbox.handler("greet", retry=MUCH_LATER)
    async def greet(message: Message, ctx: Context) -> None:
        await asyncio.Event().wait()

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert attempts_of(db, message_id) == [(1, "retry", "timed out after 0.05 s, outcome unknown")]


# --- misbehaviour -----------------------------------------------------------------------------------------------------


class LetGo(logging.Handler):
    """Receives the log record of the blocked event loop in another thread, and ends the block."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Record the log record and let the handler continue."""
        if getattr(record, "event", None) == LogEvent.LOOP_BLOCKED:
            self.records.append(record)
            self.event.set()


@pytest.mark.slow
@pytest.mark.parametrize("is_batch", [False, True], ids=["single", "batch"])
async def test_a_handler_that_blocks_the_event_loop_is_named_in_the_log_during_the_block(
    outbox: Outbox, db: psycopg.Connection, is_batch: bool
) -> None:
    heard = LetGo()

    def block() -> None:
        assert heard.event.wait(PATIENCE_SECONDS)

    if is_batch:

        @outbox.batch_handler("greet")
        async def greet_all(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
            block()

    else:

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            block()

    message_id = enqueue(db)
    worker = Worker(outbox)
    logger = logging.getLogger("pgoutbox")
    logger.addHandler(heard)
    try:
        await worker.run_once()
    finally:
        logger.removeHandler(heard)
    assert state_of(db, message_id) == State.SENT
    assert worker.telemetry.counts[LogEvent.LOOP_BLOCKED] == 1
    (record,) = heard.records
    assert (vars(record)["topic"], vars(record)["message_id"]) == ("greet", message_id)
    module, line = vars(record)["place"].split(":")
    assert (module, linecache.getline(__file__, int(line)).strip()) == (__name__, "block()")


class UnprintableError(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


MISBEHAVIOUR: dict[str, tuple[Callable[[], BaseException], str]] = {
    "unprintable": (UnprintableError, "UnprintableError: (its text cannot be read: RuntimeError)"),
    "nul": (lambda: ValueError("a\x00b"), "ValueError: a\\x00b"),
    "surrogate": (lambda: ValueError("a\ud800b"), "ValueError: a\\ud800b"),
    "huge": (lambda: ValueError("x" * 10_000_000), "ValueError: xxx"),
    "transient with nul": (lambda: Transient("a\x00b"), "a\\x00b"),
    "system exit": (lambda: SystemExit(3), "SystemExit: 3"),
    "keyboard interrupt": (KeyboardInterrupt, "KeyboardInterrupt"),
    "cancelled": (asyncio.CancelledError, "CancelledError"),
    "generator exit": (GeneratorExit, "GeneratorExit"),
    "stop iteration": (StopIteration, "StopIteration"),
    "stop async iteration": (StopAsyncIteration, "StopAsyncIteration"),
    "group": (lambda: BaseExceptionGroup("several", [ValueError("a")]), "ExceptionGroup: several"),
}


@pytest.mark.slow
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_after_any_exception_the_message_is_retried_and_the_others_are_sent(
    outbox: Outbox, db: psycopg.Connection, kind: str, transactional: bool
) -> None:
    def misbehave(message: Message) -> None:
        if message.payload in MISBEHAVIOUR:
            make_error, _ = MISBEHAVIOUR[str(message.payload)]
            raise make_error()

    if kind == "async":

        @outbox.handler("greet", retry=MUCH_LATER, transactional=transactional)
        async def greet(message: Message, ctx: Context) -> None:
            await ctx.ensure_lease()
            misbehave(message)

    else:

        @outbox.handler("greet", retry=MUCH_LATER, transactional=transactional)
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            # The event loop has answered, so that it waits for this thread when the error occurs.
            ctx.ensure_lease()
            misbehave(message)

    good = [enqueue(db, payload="good")]
    bad = {}
    for name in MISBEHAVIOUR:
        bad[name] = enqueue(db, payload=name)
        good.append(enqueue(db, payload="good"))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db, *good)] == ["sent"] * len(good)
    rows = {name: row_of(db, message_id) for name, message_id in bad.items()}
    assert {name: row.state for name, row in rows.items()} == dict.fromkeys(MISBEHAVIOUR, "pending")
    errors = {name: row.last_error or "" for name, row in rows.items()}
    assert [name for name, (_, text) in MISBEHAVIOUR.items() if text not in errors[name]] == []
    assert max(map(len, errors.values())) <= 4000


@pytest.mark.slow
async def test_a_message_is_retried_until_a_release_returns_a_valid_result(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    nonsense = [42, "done", b"\x00", ["x" * 50_000_000], object(), Sent]
    results = dict(enumerate(nonsense))

    @outbox.handler("greet", retry=MUCH_LATER)
    async def greet(message: Message, ctx: Context) -> Sent:
        return cast("Sent", results.get(int(str(message.payload)), Sent()))

    bad = [enqueue(db, payload=i) for i in range(len(nonsense))]
    good = enqueue(db, payload=len(nonsense))
    await Worker(outbox).run_once()
    rows = rows_of(db, *bad)
    assert [(row.state, row.attempt_count) for row in rows] == [("pending", 1)] * len(bad)
    told = [(row.last_error or "").partition(";")[0] for row in rows]
    assert told == [f"the handler returned a {type(value).__name__}" for value in nonsense]
    assert state_of(db, good) == State.SENT

    results.clear()  # The next release.
    db.execute("UPDATE pgoutbox.message SET available_at = now() WHERE state = 'pending'")
    await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db, *bad)] == ["sent"] * len(bad)


@pytest.mark.parametrize("kind", ["async", "sync", "batch", "count of a batch"])
async def test_an_invalid_result_is_an_unknown_outcome(outbox: Outbox, db: psycopg.Connection, kind: str) -> None:
    result = cast("Any", object())
    if "batch" in kind:

        @outbox.batch_handler("greet", retry=MUCH_LATER, on_unknown="hold")
        async def greet_all(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Outcome]:
            return [result] if kind == "batch" else []

    elif kind == "sync":

        @outbox.handler("greet", retry=MUCH_LATER, on_unknown="hold")
        def greet_in_thread(message: Message, ctx: SyncContext) -> Sent:
            return cast("Sent", result)

    else:

        @outbox.handler("greet", retry=MUCH_LATER, on_unknown="hold")
        async def greet(message: Message, ctx: Context) -> Sent:
            return cast("Sent", result)

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.attempt_count) == ("failed", 1)
    assert "must return None" in str(row.last_error)


async def test_an_unstorable_reason_is_sanitized(outbox: Outbox, db: psycopg.Connection) -> None:
    reasons = ["", "a\x00b", "\ud800", "x" * 5000]

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Skip:
        return Skip(reasons[int(str(message.payload))])

    ids = [enqueue(db, payload=i) for i in range(len(reasons))]
    await Worker(outbox).run_once()
    written = [row.skip_reason for row in rows_of(db, *ids)]
    assert written == ["skipped by its handler", "a\\x00b", "\\ud800", "x" * 3999 + "…"]


async def test_an_invalid_delay_is_kept_within_bounds(outbox: Outbox, db: psycopg.Connection) -> None:
    delays = [float("inf"), float("nan"), 1e300]

    @outbox.handler("snooze")
    async def snooze(message: Message, ctx: Context) -> Snooze:
        return Snooze(1e300)

    @outbox.handler("greet", retry=RetryPolicy(base=1, cap=60))
    async def greet(message: Message, ctx: Context) -> Transient:
        return Transient("busy", retry_after=delays[int(str(message.payload))])

    snoozed = [enqueue(db, topic="snooze")]
    retried = [enqueue(db, payload=i) for i in range(len(delays))]
    await Worker(outbox).run_once()
    assert [round(row.due_in_seconds / 86_400) for row in rows_of(db, *snoozed)] == [30]
    assert [round(row.due_in_seconds / 60) for row in rows_of(db, *retried)] == [1] * 3


@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize("delay", [0, -1, 0.001, timedelta(days=-1)])
async def test_a_snooze_without_a_pause_lasts_a_second(
    outbox: Outbox, db: psycopg.Connection, delay: float | timedelta, raised: bool
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Snooze:
        if raised:
            raise Snooze(delay)
        return Snooze(delay)

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    attempts = """
        SELECT a.outcome, m.available_at - a.ended_at >= '0.9 seconds'
        FROM pgoutbox.attempt_view AS a
        JOIN pgoutbox.message AS m ON m.id = a.message_id
        WHERE m.id = %s
    """
    assert db.execute(attempts, [message_id]).fetchall() == [("snoozed", True)]


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_batch_handler_gets_its_messages_together_and_returns_an_outcome_for_each(
    outbox: Outbox, db: psycopg.Connection, kind: str
) -> None:
    sizes: list[int] = []

    def decide(messages: Sequence[Message]) -> list[Outcome]:
        sizes.append(len(messages))
        return [Permanent("odd") if message.payload == "odd" else Sent() for message in messages]

    if kind == "async":

        @outbox.batch_handler("index", max_size=3)
        async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Outcome]:
            return decide(messages)

    else:

        @outbox.batch_handler("index", max_size=3)
        def index_in_thread(messages: Sequence[Message], contexts: Sequence[SyncContext]) -> list[Outcome]:
            return decide(messages)

    ids = [enqueue(db, topic="index", payload="odd" if i % 2 else "even") for i in range(4)]
    await Worker(outbox).run_once()
    assert sorted(sizes) == [1, 3]
    assert [row.state for row in rows_of(db, *ids)] == ["sent", "failed", "sent", "failed"]


async def test_a_batch_with_the_wrong_number_of_outcomes_is_retried_with_that_reason(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=50))
    answers: list[object] = [[], [Sent()], [Sent()] * 3, "ab", 2, Sent()]
    given = iter(answers)

    @outbox.batch_handler("index", max_size=2, retry=MUCH_LATER)
    async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Outcome]:
        return cast("list[Outcome]", next(given))

    ids = [enqueue(db, topic="index") for _ in range(2 * len(answers))]
    await Worker(outbox).run_once()
    rows = rows_of(db, *ids)
    assert [row.state for row in rows] == ["pending"] * len(ids)
    assert all("2 outcomes" in (row.last_error or "") for row in rows)


async def test_a_batch_that_returns_none_was_sent(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.batch_handler("index")
    async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> None: ...

    ids = [enqueue(db, topic="index") for _ in range(5)]
    await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db, *ids)] == ["sent"] * 5


async def test_an_exception_in_a_batch_is_the_outcome_of_each_message(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.batch_handler("index", retry=MUCH_LATER)
    async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        raise SystemExit("index is down")

    ids = [enqueue(db, topic="index") for _ in range(3)]
    await Worker(outbox).run_once()
    assert [(row.state, row.last_error) for row in rows_of(db, *ids)] == [("pending", "SystemExit: index is down")] * 3


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_an_exception_about_one_message_of_a_batch_ends_no_other(
    outbox: Outbox, db: psycopg.Connection, kind: str
) -> None:
    def invite(messages: Sequence[Message]) -> list[Outcome]:
        for message in messages:
            Email(to=cast("str", message.payload), subject="Come", text="Tonight")
        return [Sent() for _ in messages]

    if kind == "async":

        @outbox.batch_handler("invite")
        async def invite_all(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Outcome]:
            return invite(messages)

    else:

        @outbox.batch_handler("invite")
        def invite_all_in_thread(messages: Sequence[Message], contexts: Sequence[SyncContext]) -> list[Outcome]:
            return invite(messages)

    wrong = {3: "ann@example.org, bob@example.org", 7: "nobody"}
    ids = [enqueue(db, topic="invite", payload=wrong.get(n, f"guest{n}@example.org")) for n in range(9)]
    await Worker(outbox).run_once()
    rows = rows_of(db, *ids)
    assert {n: row.last_error for n, row in enumerate(rows) if row.state == "failed"} == {
        3: "email.to: has more than one @; give several addresses as a sequence",
        7: "email.to: has no @",
    }
    assert [row.state for n, row in enumerate(rows) if n not in wrong] == ["sent"] * 7


async def test_a_batch_that_raises_an_end_for_each_message_ends_them_all(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    calls: list[int] = []

    @outbox.batch_handler("invite")
    async def invite(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        calls.append(len(messages))
        raise Skip("the party is cancelled")

    ids = [enqueue(db, topic="invite") for _ in range(5)]
    await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db, *ids)] == ["skipped"] * 5
    assert calls.count(1) == 5


async def test_an_invalid_outcome_of_one_batch_message_retries_only_that_message(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    @outbox.batch_handler("index", retry=MUCH_LATER)
    async def index(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Outcome]:
        return [cast("Outcome", 42), Sent()]

    ids = [enqueue(db, topic="index") for _ in range(2)]
    await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db, *ids)] == ["pending", "sent"]


# --- transactional handlers -------------------------------------------------------------------------------------------


@pytest.fixture
def effects(db: psycopg.Connection) -> Callable[[], list[int]]:
    """Create a table for the handlers' writes, and return a function that reads its message ids."""
    db.execute("CREATE TABLE effect (message_id bigint)")
    return lambda: [row[0] for row in db.execute("SELECT message_id FROM effect ORDER BY 1").fetchall()]


WRITE_EFFECT = "INSERT INTO effect VALUES (%s)"


def register_transactional(outbox: Outbox, kind: str, then: Callable[[Message], Outcome | None]) -> None:
    """Register a transactional handler of topic `greet` that writes its message's id and then runs `then`."""
    if kind == "async":

        @outbox.handler("greet", transactional=True, retry=MUCH_LATER)
        async def greet(message: Message, ctx: Context) -> Outcome | None:
            await ctx.connection.execute(WRITE_EFFECT, [message.id])
            return then(message)

    else:

        @outbox.handler("greet", transactional=True, retry=MUCH_LATER)
        def greet_in_thread(message: Message, ctx: SyncContext) -> Outcome | None:
            ctx.connection.execute(WRITE_EFFECT, [message.id])
            return then(message)


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_the_writes_of_a_transactional_handler_with_an_invalid_result_are_rolled_back(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], kind: str
) -> None:
    register_transactional(outbox, kind, lambda _: cast("Outcome", "done"))
    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert row_of(db, message_id).state == "pending"
    assert effects() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_the_writes_of_a_transactional_handler_commit_with_the_completion(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], kind: str
) -> None:
    db.execute(
        """
        CREATE FUNCTION effects_are_complete() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NOT EXISTS (SELECT FROM public.effect WHERE message_id = NEW.id) THEN
                RAISE EXCEPTION 'sent without its effect';
            END IF;
            RETURN NULL;
        END
        $$
        """
    )
    db.execute(
        "CREATE CONSTRAINT TRIGGER complete AFTER INSERT ON pgoutbox.message_done_default "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION effects_are_complete()"
    )
    register_transactional(outbox, kind, lambda _: None)
    ids = [enqueue(db) for _ in range(3)]
    worker = Worker(outbox)
    await worker.run_once()
    assert effects() == ids
    assert [row.state for row in rows_of(db, *ids)] == ["sent"] * 3
    assert worker.telemetry.counts[LogEvent.SENT] == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_an_outcome_other_than_sent_rolls_the_handlers_writes_back(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], kind: str
) -> None:
    register_transactional(outbox, kind, lambda message: OUTCOMES[str(message.payload)])
    ids = [enqueue(db, payload=name) for name in OUTCOMES]
    await Worker(outbox).run_once()
    assert effects() == []
    states = [row.state for row in rows_of(db, *ids)]
    assert states == ["pending", "pending", "failed", "skipped", "pending"]


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_the_loss_of_the_message_rolls_the_handlers_writes_back(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], kind: str
) -> None:
    def lose(message: Message) -> None:
        with db.transaction():  # In between, the worker itself could claim it.
            lapse(db, message.id)
            assert ids_in_flight(claim(db, worker="another")) == [message.id]

    register_transactional(outbox, kind, lose)
    message_id = enqueue(db)
    worker = Worker(outbox)
    async with asyncio.timeout(10):
        await worker.run_once()
    assert effects() == []
    row = row_of(db, message_id)
    assert (row.state, row.worker, row.attempt_count) == ("sending", "another", 2)
    assert worker.telemetry.counts[LogEvent.LEASE_LOST] == 1


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_an_aborted_transaction_of_a_handler_is_not_a_completion(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], kind: str
) -> None:
    if kind == "async":

        @outbox.handler("greet", transactional=True, retry=MUCH_LATER)
        async def greet(message: Message, ctx: Context) -> None:
            with contextlib.suppress(psycopg.Error):
                await ctx.connection.execute("SELECT 1 / 0")

    else:

        @outbox.handler("greet", transactional=True, retry=MUCH_LATER)
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            with contextlib.suppress(psycopg.Error):
                ctx.connection.execute("SELECT 1 / 0")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert row.state == State.PENDING
    assert "aborted" in (row.last_error or "")


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_block_of_the_drivers_own_transaction_commits_with_the_completion(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], kind: str
) -> None:
    at_once = RetryPolicy.steps(0, jitter=0)
    if kind == "async":

        @outbox.handler("greet", transactional=True, retry=at_once)
        async def greet(message: Message, ctx: Context) -> None:
            async with ctx.connection.transaction():
                await ctx.connection.execute(WRITE_EFFECT, [message.id])
            if message.attempt_count < 3:
                raise Transient("after the block")

    else:

        @outbox.handler("greet", transactional=True, retry=at_once)
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            with ctx.connection.transaction():
                ctx.connection.execute(WRITE_EFFECT, [message.id])
            if message.attempt_count < 3:
                raise Transient("after the block")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.attempt_count) == (State.SENT, 3)
    assert effects() == [message_id]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["commit", "rollback", "autocommit", "COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_handler_that_ends_its_transaction_is_not_a_completion(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], kind: str, how: str
) -> None:
    """The driver refuses its own methods. A statement ends the transaction, and the attempt fails."""
    if kind == "async":

        @outbox.handler("greet", transactional=True, retry=MUCH_LATER)
        async def greet(message: Message, ctx: Context) -> None:
            await ctx.connection.execute(WRITE_EFFECT, [message.id])
            match how:
                case "commit":
                    await ctx.connection.commit()
                case "rollback":
                    await ctx.connection.rollback()
                case "autocommit":
                    await ctx.connection.set_autocommit(True)
                case _:
                    await ctx.connection.execute(how.encode())

    else:

        @outbox.handler("greet", transactional=True, retry=MUCH_LATER)
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            ctx.connection.execute(WRITE_EFFECT, [message.id])
            match how:
                case "commit":
                    ctx.connection.commit()
                case "rollback":
                    ctx.connection.rollback()
                case "autocommit":
                    ctx.connection.autocommit = True
                case _:
                    ctx.connection.execute(how.encode())

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert row.state == State.PENDING
    assert row.last_error
    assert effects() == ([message_id] if how == "COMMIT" else [])


async def test_only_a_transactional_handler_has_a_connection(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet", retry=MUCH_LATER)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute("SELECT 1")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert "transactional=True" in (row_of(db, message_id).last_error or "")


# --- overtaken attempts -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("how", ["cancelled", "superseded", "lease lost"])
async def test_an_overtaken_attempt_learns_of_it_before_its_side_effect(
    outbox: Outbox, db: psycopg.Connection, how: str, kind: str
) -> None:
    refused: list[str] = []

    def overtake(message: Message) -> None:
        if how == "cancelled":
            assert cancel(db, message.id) == "requested"
        elif how == "superseded":
            enqueue(db, coalesce_key="k", queue="other")
        else:
            with db.transaction():  # In between, the worker itself could claim it.
                lapse(db, message.id)
                assert ids_in_flight(claim(db, worker="another")) == [message.id]

    if kind == "async":

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            await ctx.ensure_lease()
            overtake(message)
            try:
                await ctx.ensure_lease()
            except LeaseLostError as error:
                refused.append(str(error))
                assert ctx.should_stop
                raise

    else:

        @outbox.handler("greet")
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            ctx.ensure_lease()
            overtake(message)
            try:
                ctx.ensure_lease()
            except LeaseLostError as error:
                refused.append(str(error))
                assert ctx.should_stop
                raise

    message_id = enqueue(db, coalesce_key="k")
    worker = Worker(outbox)
    await worker.run_once()
    assert refused == [f"message {message_id}, attempt 1: {how}"]
    ends = {"cancelled": State.CANCELLED, "superseded": State.SKIPPED, "lease lost": State.SENDING}
    assert state_of(db, message_id) == ends[how]
    assert worker.telemetry.counts[LogEvent.ATTEMPT_OVERTAKEN] == 1


@pytest.mark.slow
async def test_a_running_handler_learns_of_a_cancellation(outbox: Outbox, db: psycopg.Connection) -> None:
    with reports() as heard:

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            assert cancel(db, message.id) == "requested"
            assert not ctx.should_stop
            await heard.wait_for(LogEvent.ATTEMPT_OVERTAKEN)
            assert ctx.should_stop
            raise Transient("given up")

        message_id = enqueue(db)
        await Worker(outbox).run_once()
    assert state_of(db, message_id) == State.CANCELLED


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_a_worker_stopped_before_it_reached_the_database_does_not_log_its_start() -> None:
    outbox = Outbox(settings_for("postgresql://nobody@127.0.0.1:1/nowhere"))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    with reports() as heard:
        async with running(Worker(outbox)):
            await heard.wait_for(LogEvent.DATABASE_LOST)
    lifecycle = [event for event in heard.events if event.startswith("worker_")]
    assert lifecycle == [LogEvent.WORKER_STOPPING, LogEvent.WORKER_STOPPED]


async def test_a_stop_releases_unfinished_messages_without_using_up_attempts(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1, shutdown_grace_seconds=0))
    started = asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        started.set()
        if not second_run:
            await asyncio.Event().wait()

    second_run = False
    ids = [enqueue(db, max_attempts=1) for _ in range(10)]
    async with running(Worker(outbox)):
        await started.wait()
    rows = rows_of(db, *ids)
    assert [row.state for row in rows] == ["pending"] * 10
    assert all(row.max_attempts == row.attempt_count + 1 for row in rows)
    assert rows[0].attempt_count == 1
    second_run = True
    await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db, *ids)] == ["sent"] * 10


async def test_a_handler_that_ends_within_the_grace_period_is_not_interrupted(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    started, finish_now = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        started.set()
        await finish_now.wait()

    message_id = enqueue(db)
    worker = Worker(outbox)
    async with running(worker):
        await started.wait()
        worker.stop()
        finish_now.set()
    assert state_of(db, message_id) == State.SENT


async def test_a_worker_that_was_stopped_before_its_run_ends_at_once(outbox: Outbox) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    worker.stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await worker.run()


async def test_a_second_cancellation_during_the_end_of_maintenance_leaves_no_message_in_flight(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = asyncio.Event()

    async def never_stop(_: Maintenance) -> None:
        ending.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Maintenance, "stop", never_stop)
    held = Held(dsn, shutdown_grace_seconds=0)
    message_id = enqueue(db)
    tasks = asyncio.all_tasks()
    work = asyncio.create_task(held.worker.run())
    await held.until_begun(message_id)
    work.cancel()
    await ending.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert state_of(db, message_id) == "pending"
    assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize(
    ("part", "work"),
    [(Presence, "keep_reporting"), (Maintenance, "keep_taking_turns"), (FailureAlerts, "keep_looking")],
)
async def test_a_worker_raises_the_error_of_work_beside_deliveries_at_its_end(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, part: type[object], work: str
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    async def fail(_: object) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(part, work, fail)
    worker = WatchedWorker(outbox)
    with pytest.raises(RuntimeError, match="planned"):
        async with running(worker):
            await worker.asleep.wait()


@pytest.mark.slow
async def test_an_attempt_lost_in_a_failover_does_not_end_a_new_message_with_the_same_id(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))
    may_end = {"lost": asyncio.Event(), "found": asyncio.Event()}
    begun: list[object] = []
    ended: list[object] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        name = str(message.payload)
        begun.append(name)
        await may_end[name].wait()
        ended.append(name)

    lost = enqueue(db, payload="lost")
    async with running(Worker(outbox)):
        await until(lambda: begun == ["lost"])
        with db.transaction():
            db.execute("DELETE FROM pgoutbox.message_live WHERE id = %s", [lost])
            db.execute("SELECT setval('pgoutbox.message_id_seq', %s, false)", [lost])
            assert enqueue(db, payload="found") == lost
        await until(lambda: begun == ["lost", "found"])
        may_end["lost"].set()
        other = enqueue(db, payload="found")
        await until(lambda: ended == ["lost"] and len(begun) == 3)
        assert state_of(db, lost) == State.SENDING
        may_end["found"].set()
        await until(lambda: {row.state for row in rows_of(db, lost, other)} == {State.SENT})


async def test_each_run_of_a_worker_has_its_own_name(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    for _ in range(2):
        enqueue(db)
        await worker.run_once()
    assert len({row.worker for row in rows_of(db)}) == 2


@pytest.mark.parametrize("max_attempts", [1, 11])
async def test_a_worker_continues_its_attempt_after_its_lease_lapsed_and_starts_no_second_one(
    dsn: str, db: psycopg.Connection, max_attempts: int
) -> None:
    """The state after a suspension, or an outage of the database, that was longer than a lease."""
    outbox = Outbox(settings_for(dsn))
    may_end = asyncio.Event()
    calls: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        calls.append(message.id)
        if message.id == held:
            await may_end.wait()

    held = enqueue(db, max_attempts=max_attempts)
    async with running(Worker(outbox)):
        await until(lambda: calls == [held])
        lapse(db, held)
        other = enqueue(db)
        await until(lambda: state_of(db, other) == State.SENT)
        may_end.set()
        await until(lambda: state_of(db, held) == State.SENT)
    assert (calls, attempts_of(db, held)) == ([held, other], [])


async def test_a_worker_treats_an_attempt_in_its_name_that_it_does_not_hold_as_lost(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state after a failover to a standby that has received the claim but not the outcome."""
    outbox = Outbox(settings_for(dsn))
    calls: list[tuple[int, int]] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        calls.append((message.id, message.attempt_count))

    monkeypatch.setattr("pgoutbox.worker.run._name_for", lambda settings: "itself")
    forgotten = enqueue(db)
    claim(db, worker="itself")
    lapse(db, forgotten)
    async with running(Worker(outbox)):
        await until(lambda: state_of(db, forgotten) == State.SENT)
    assert calls == [(forgotten, 2)]
    assert [outcome for _, outcome, _ in attempts_of(db, forgotten)] == ["lost"]


async def test_a_worker_cancelled_before_its_handlers_see_a_claim_releases_the_messages(
    dsn: str, connect: Connect
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    db, locker = connect(autocommit=True), connect()
    db.execute('SELECT pgoutbox.enqueue_fanout(\'{"topic": "greet", "payload": {}}\', \'["tel:1", "tel:2"]\', \'1\')')
    locker.execute("LOCK TABLE pgoutbox.content IN ACCESS EXCLUSIVE MODE")
    work: asyncio.Task[object] = asyncio.create_task(Worker(outbox).run())
    await until_blocked(db, work)
    assert {row.state for row in rows_of(db)} == {State.SENDING}
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert {row.state for row in rows_of(db)} == {State.PENDING}


@pytest.fixture
async def idle(outbox: Outbox) -> AsyncIterator[WatchedWorker]:
    """Run a worker that has nothing to do."""

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = WatchedWorker(outbox)
    async with running(worker):
        await worker.asleep.wait()
        yield worker


async def test_stopping_wakes_a_sleeping_worker(idle: WatchedWorker) -> None:
    idle.stop()
    idle.stop()
    assert idle.telemetry.counts[LogEvent.WORKER_STOPPING] == 1


# --- killed and stopped processes -------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_handler_that_blocks_the_event_loop_keeps_its_lease(dsn: str, db: psycopg.Connection) -> None:
    lease = 2.0
    outbox = Outbox(settings_for(dsn, lease_seconds=lease))
    delivered: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        time.sleep(2 * lease)  # noqa: ASYNC251 - the fault that this test is about
        assert claim(db, worker="thief") == []
        delivered.append(message.attempt_count)

    message_id = enqueue(db)
    worker = Worker(outbox)
    await worker.run_once()
    assert delivered == [1]
    assert (row_of(db, message_id).state, row_of(db, message_id).attempt_count) == ("sent", 1)
    assert worker.telemetry.counts[LogEvent.LEASE_LOST] == 0


# --- a database in trouble --------------------------------------------------------------------------------------------


def terminate(db: psycopg.Connection, purpose: str) -> int:
    """Terminate the worker's connections of one purpose, and return their number."""
    return len(
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE %s",
            [f"pgoutbox {purpose}%"],
        ).fetchall()
    )


@pytest.mark.slow
async def test_a_terminated_producer_leaves_nothing_behind(
    outbox: Outbox, connect: Connect, db: psycopg.Connection
) -> None:
    delivered: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.append(message.id)

    producer = connect()
    enqueue(producer)
    kept = enqueue(db)
    db.execute("SELECT pg_terminate_backend(%s, 10000)", [producer.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        producer.commit()
    await Worker(outbox).run_once()
    assert delivered == [kept]
    assert [row.id for row in rows_of(db)] == [kept]


async def test_a_worker_continues_while_its_claims_fail_and_logs_it_once(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    delivered = asyncio.Event()

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.set()

    worker = WatchedWorker(outbox)
    with reports() as heard:
        async with running(worker):
            await worker.asleep.wait()
            terminate(db, "claim")
            enqueue(db)
            await delivered.wait()
            await heard.wait_for(LogEvent.DATABASE_BACK)
    assert heard.events.count(LogEvent.DATABASE_LOST) == 1


@pytest.mark.slow
async def test_successful_reads_on_a_read_only_server_do_not_end_an_outage(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    head = enqueue(db, ordering_key="k")
    assert [row.id for row in claim_ordered(db)] == [head]
    enqueue(db, ordering_key="k")  # The messages behind the head make the worker search the ordering keys.
    worker = WatchedWorker(outbox)
    pids = set()

    def has_connected_often() -> bool:
        sessions = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s"
        pids.update(db.execute(sessions, ["pgoutbox claim%"]).fetchall())
        return len(pids) > 5

    with reports() as heard:
        async with running(worker):
            await worker.asleep.wait()
            db.execute(f"ALTER DATABASE {db.info.dbname} SET default_transaction_read_only = on".encode())
            terminate(db, "claim")
            enqueue(db)
            await until(has_connected_often)  # A refusal ends the session.
            db.execute(f"ALTER DATABASE {db.info.dbname} RESET default_transaction_read_only".encode())
            await heard.wait_for(LogEvent.DATABASE_BACK)
    assert heard.events.count(LogEvent.DATABASE_LOST) == 1


# Long enough to open and prepare a session on a slow machine.
HOSTILE_DEFAULTS = {
    "default_transaction_isolation": "serializable",
    "statement_timeout": "5s",
    "lock_timeout": "4s",
    "idle_in_transaction_session_timeout": "5s",
    "idle_session_timeout": "5s",
    "transaction_timeout": "5s",
    "search_path": "hostile",
    "enable_indexscan": "on",
}


@pytest.mark.slow
async def test_role_defaults_do_not_affect_the_workers_statements(dsn: str, connect: Connect, server: Server) -> None:
    db = connect(autocommit=True)
    for name, value in HOSTILE_DEFAULTS.items():
        if db.execute("SELECT current_setting(%s, true)", [name]).fetchone() == (None,):
            continue  # An older server does not have this setting.
        statement = psycopg.sql.SQL("ALTER ROLE {} IN DATABASE {} SET {} = {}").format(
            psycopg.sql.Identifier(server.user),
            psycopg.sql.Identifier(db.info.dbname),
            psycopg.sql.Identifier(name),
            psycopg.sql.Literal(value),
        )
        db.execute(statement)
    settings = settings_for(dsn, statement_timeout_seconds=20, lock_timeout_seconds=3)
    pinned = {
        "transaction_isolation": "read committed",
        "statement_timeout": "20s",
        "lock_timeout": "3s",
        "search_path": "pg_catalog, pg_temp",
    }
    if db.info.server_version >= 170_000:
        pinned["transaction_timeout"] = "30s"  # With the ten seconds of a connection attempt.
    of_its_own_session = {"idle_in_transaction_session_timeout": "1min", "idle_session_timeout": "0"}
    for listen, expected in ((True, pinned | of_its_own_session), (False, pinned)):
        link = WorkerConnection(dsn, settings.model_copy(update={"listen": listen}), purpose="test")
        rows = await link.fetch(
            "SELECT s.name, coalesce(current_setting(s.name, true), '0') FROM unnest(%(names)s::text[]) AS s(name)",
            {"names": list(expected)},
        )
        await link.close()
        assert dict(rows) == expected

    outbox = Outbox(settings)

    @outbox.handler("greet", retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> None:
        if message.attempt_count == 1:
            raise Transient("busy")

    ids = [enqueue(db) for _ in range(20)]
    await asyncio.gather(*(Worker(outbox).run_once() for _ in range(3)))
    await Worker(outbox).drain()
    assert {(row.state, row.attempt_count) for row in rows_of(db, *ids)} == {("sent", 2)}


@pytest.mark.slow
async def test_snoozes_and_redrives_do_not_lengthen_the_pause_after_a_failure(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", retry=RetryPolicy.steps(100, 1_000))
    async def greet(message: Message, ctx: Context) -> None:
        raise Snooze(0) if message.attempt_count <= 5 else Transient("busy")

    message_id = enqueue(db)
    for _ in range(6):
        await Worker(outbox).run_once()
        db.execute("UPDATE pgoutbox.message SET available_at = now() WHERE id = %s AND attempt_count < 6", [message_id])
    row = row_of(db, message_id)
    assert (row.attempt_count, row.max_attempts) == (6, 16)
    (pause,) = db.execute(
        "SELECT extract(epoch FROM available_at - now())::float8 FROM pgoutbox.message WHERE id = %s", [message_id]
    ).fetchone() or (0.0,)
    assert 0 < pause <= 100


async def test_a_notified_message_does_not_wait_for_a_slow_search(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(settings_for(dsn))
    found: list[bool] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    async def note(steps: Sequence[Step], trip: Trip) -> list[list[Row]]:
        results = await trip(steps)
        for step, rows in zip(steps, results, strict=True):
            if claims([step]):
                (since_seconds, *_) = str(step[1]["since_seconds"]).strip("{}").split(",")
                is_search = float(since_seconds) > 3600
                if rows:
                    found.append(is_search)
        return results

    monkeypatch.setattr(Link, "trip", around_trips(note))
    monkeypatch.setattr(lanes, "_CHEAP_SEARCH_SECONDS", 0.0)  # Each search counts as slow.
    monkeypatch.setattr(lanes, "_PAUSE_AFTER_SEARCH", 0)  # A search may always begin.
    async with running(worker := Worker(outbox)):
        await until_idle(worker)
        for _ in range(5):
            message_id = enqueue(db)
            await until(lambda: state_of(db, message_id) == State.SENT)  # noqa: B023 - at once
            await until_idle(worker)
    assert found == [False] * 5


async def test_one_run_delivers_messages_that_fall_due_again(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> None:
        if message.attempt_count < 3:
            raise Transient("busy")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert state_of(db, message_id) == State.SENT
