"""Tests the doorbell: no commit is missed, and no commit notifies while no worker is idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import psycopg.sql
import pytest

import pgoutbox.worker.doorbell
from pgoutbox import Outbox
from pgoutbox.clock import elapsed_clock
from pgoutbox.database import sql
from pgoutbox.database.store import Store
from pgoutbox.handlers import Context
from pgoutbox.message import Message, State, Transient
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from pgoutbox.worker.doorbell import Doorbell, LockAnswer
from pgoutbox.worker.signals import Signals
from tests.support.old_worker import WatchedWorker, ask_for_locks, doorbell_of, run_of
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    enqueue,
    first_of,
    reports,
    running,
    settings_for,
    state_of,
    until_blocked,
)
from tests.support.races import ADVISORY_LOCKS
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tests.conftest import Connect, Server


# It answers when the lock is free, but from its old snapshot.
GATED_ACQUIRE = f"""
    WITH answer AS MATERIALIZED ({sql.ACQUIRE_LOCKS})
    SELECT answer.* FROM answer WHERE pg_advisory_lock_shared(1) IS NOT NULL
"""


class Notified(Signals):
    """A doorbell and the queues of its notifications; `looks` is set when a look is due."""

    def __init__(self, dsn: str, topics: Sequence[str]) -> None:
        self.queues: list[str | None] = []
        self.heard = asyncio.Event()
        self.looks = asyncio.Event()
        self.telemetry = Telemetry(logging.getLogger("pgoutbox.test"))
        self.topics = list(topics)
        self.doorbell = Doorbell(settings_for(dsn), self.topics, self, self.telemetry)

    def note_notification(self, queue: str | None, /, *, is_new: bool = False) -> None:
        """Record the queue."""
        self.queues.append(queue)
        self.heard.set()

    def poll_again(self) -> None:
        """Record that a look is due."""
        self.looks.set()

    async def queues_so_far(self) -> list[str | None]:
        """Return the queues so far. The answer to a heartbeat arrives after every notification in transit."""
        await self.doorbell._heartbeat()
        return self.queues


@pytest.fixture
async def notified(dsn: str) -> AsyncIterator[Callable[..., Notified]]:
    """Create doorbells, and stop them when the test ends. The test starts them."""
    made: list[Notified] = []

    def make(*topics: str) -> Notified:
        made.append(Notified(dsn, topics or ["greet"]))
        return made[-1]

    yield make
    for one in made:
        await one.doorbell.stop()


async def started(notified: Callable[..., Notified], *topics: str) -> Notified:
    one = notified(*topics)
    await one.doorbell.start()
    return one


async def test_an_enqueue_does_not_notify_while_no_worker_is_idle(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    one = await started(notified)
    enqueue(db)
    assert await one.queues_so_far() == []


async def test_every_commit_notifies_while_a_worker_has_the_wake_up_lock(
    notified: Callable[..., Notified], connect: Connect, db: psycopg.Connection
) -> None:
    one, rolling_back = await started(notified), connect()
    assert await one.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    enqueue(db)
    enqueue(db)
    enqueue(rolling_back)
    rolling_back.rollback()
    assert await one.queues_so_far() == ["default", "default"]


async def test_the_notification_contains_only_the_queue(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    one = await started(notified)
    await one.doorbell.acquire(["default", "bulk"])
    enqueue(db, queue="bulk", payload={"secret": "s3cret"})
    enqueue(db, queue="other")
    assert await one.queues_so_far() == ["bulk"]


async def test_an_enqueue_can_request_no_notification(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    one = await started(notified)
    await one.doorbell.acquire(["default"])
    enqueue(db, notify=False)
    assert await one.queues_so_far() == []


async def test_acquiring_reports_open_enqueues_until_they_have_committed(
    notified: Callable[..., Notified], connect: Connect
) -> None:
    one, producer = await started(notified), connect()
    enqueue(producer)
    assert await one.doorbell.acquire(["default"]) is LockAnswer.PRODUCERS
    producer.commit()
    assert await one.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert await one.doorbell.acquire(["default"]) is LockAnswer.UNCHANGED


async def test_of_two_idle_workers_the_one_on_watch_is_notified(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    first, second = await started(notified), await started(notified)
    assert await first.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert await second.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    enqueue(db)
    assert (await first.queues_so_far(), await second.queues_so_far()) == (["default"], [])
    assert await second.doorbell.acquire(["default"]) is LockAnswer.UNCHANGED


@pytest.mark.slow
async def test_the_other_idle_workers_poll_after_the_watch_had_time_to_answer(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    watch, second, third = [await started(notified) for _ in range(3)]
    for one in (watch, second, third):
        await one.doorbell.acquire(["default"])
    enqueue(db)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await second.looks.wait()
        await third.looks.wait()
    assert not watch.looks.is_set()
    assert (watch.queues, second.queues, third.queues) == (["default"], [], [])


@pytest.mark.slow
async def test_an_announced_look_spares_the_workers_of_the_same_topics_theirs(
    notified: Callable[..., Notified], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, first, second = [await started(notified) for _ in range(3)]
    other_watch, other = [await started(notified, "bill") for _ in range(2)]
    for one in (watch, first, second, other_watch, other):
        await one.doorbell.acquire(["default"])
    monkeypatch.setattr(pgoutbox.worker.doorbell, "_LOOK_SECONDS", (3600, 3600))
    enqueue(db)
    for one in (first, second, other):
        await one.queues_so_far()
        assert one.doorbell._unanswered == {"default"}
    first.doorbell._look()
    await first.doorbell.announce_look()
    await second.queues_so_far()
    assert second.doorbell._look_timer is None
    await other.queues_so_far()
    assert other.doorbell._unanswered == {"default"}
    assert other.doorbell._look_timer is not None
    # The next message needs a look again, and a poll without a look announces nothing.
    enqueue(db)
    await first.doorbell.announce_look()
    await second.queues_so_far()
    assert second.doorbell._unanswered == {"default"}


async def test_the_watches_of_different_topics_are_both_notified(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    first, second = await started(notified, "greet"), await started(notified, "greet", "bill")
    await first.doorbell.acquire(["default"])
    await second.doorbell.acquire(["default"])
    enqueue(db)
    assert (await first.queues_so_far(), await second.queues_so_far()) == (["default"], ["default"])


@pytest.mark.slow
async def test_an_enqueue_does_not_notify_while_the_watch_polls(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    watch, second = await started(notified), await started(notified)
    await watch.doorbell.acquire(["default"])
    await second.doorbell.acquire(["default"])
    await watch.doorbell.release_wake_up_locks()
    assert watch.doorbell.is_on_watch
    enqueue(db)
    assert (await watch.queues_so_far(), await second.queues_so_far()) == ([], [])
    # The second one has heard of it, and polls in case the watch freezes: now, and after each question for the locks.
    for _ in range(2):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await second.looks.wait()
        second.looks.clear()
        assert await second.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    enqueue(db)
    assert (await watch.queues_so_far(), await second.queues_so_far()) == ([], [])
    assert await watch.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert await second.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert second.doorbell._relied_on == {"default"}


@pytest.mark.slow
async def test_an_announced_look_only_postpones_others_while_the_watch_polls(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    watch, first, second = [await started(notified) for _ in range(3)]
    await watch.doorbell.acquire(["default"])
    await watch.doorbell.release_wake_up_locks()
    for one in (first, second):
        await one.doorbell.acquire(["default"])
    first.doorbell._look()
    await first.doorbell.announce_look()
    await second.queues_so_far()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await second.looks.wait()


async def test_a_lock_released_while_another_worker_asks_for_it_makes_that_one_ask_again(
    notified: Callable[..., Notified], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notification arrives with the answer that the watch has the wake-up lock."""
    watch, second = await started(notified), await started(notified)
    await watch.doorbell.acquire(["default"])
    monkeypatch.setattr(sql, "ACQUIRE_LOCKS", GATED_ACQUIRE)
    db.execute("SELECT pg_advisory_lock(1)")
    asking: asyncio.Task[object] = asyncio.create_task(second.doorbell.acquire(["default"]))
    await until_blocked(db, asking)
    await watch.doorbell.release_wake_up_locks()
    db.execute("SELECT pg_advisory_unlock(1)")
    await asking
    assert second.queues == ["default"]
    assert second.doorbell._unanswered == set()
    assert await second.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert second.doorbell._unanswered == {"default"}


async def test_a_released_wake_up_lock_is_taken_over_by_the_watch_of_other_topics(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    first, second = await started(notified, "greet"), await started(notified, "bill")
    await first.doorbell.acquire(["default"])
    await second.doorbell.acquire(["default"])
    assert (first.doorbell.has_wake_up_lock, second.doorbell.has_wake_up_lock) == (True, False)
    await first.doorbell.release_wake_up_locks()
    assert await second.queues_so_far() == ["default"]
    assert await second.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert second.doorbell.has_wake_up_lock
    enqueue(db)
    assert await second.queues_so_far() == ["default", "default"]


async def test_a_worker_whose_topics_change_leaves_its_watch_to_others(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    first, second = await started(notified, "greet", "bill"), await started(notified, "greet", "bill")
    await first.doorbell.acquire(["default"])
    await second.doorbell.acquire(["default"])
    first.topics.remove("greet")
    assert await first.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert await second.queues_so_far() == ["default"]
    assert await second.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    enqueue(db)
    assert await second.queues_so_far() == ["default", "default"]


async def test_a_released_watch_wakes_the_other_idle_workers_and_is_not_notified(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    first, second = await started(notified), await started(notified)
    await first.doorbell.acquire(["default"])
    await second.doorbell.acquire(["default"])
    await first.doorbell.release()
    assert (await first.queues_so_far(), await second.queues_so_far()) == ([], ["default"])
    assert not second.doorbell.has_wake_up_lock
    enqueue(db)
    assert (await first.queues_so_far(), await second.queues_so_far()) == ([], ["default"])
    assert await second.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    enqueue(db)
    assert await second.queues_so_far() == ["default", "default"]


def test_the_locks_of_two_queues_are_separate(connect: Connect) -> None:
    idle, other = connect(autocommit=True), connect(autocommit=True)
    assert ask_for_locks(idle, "a") == [("a", True, "own", None)]
    assert ask_for_locks(other, "a", "b") == [("a", False, "other", None), ("b", True, "own", None)]


def test_one_session_of_each_set_of_topics_is_on_watch(connect: Connect) -> None:
    first, second, third = [connect(autocommit=True) for _ in range(3)]
    assert ask_for_locks(first, "a") == [("a", True, "own", None)]
    assert ask_for_locks(second, "a") == [("a", False, "other", None)]
    assert ask_for_locks(third, "a", topics=["bill"]) == [("a", True, "other", None)]
    first.execute(sql.RELEASE_WAKE_UP_LOCKS, {"queues": ["a"]})
    assert ask_for_locks(second, "a") == [("a", False, "free", None)]
    assert ask_for_locks(first, "a") == [("a", True, "own", None)]
    first.execute(sql.RELEASE_LOCKS, {"queues": ["a"]})
    assert ask_for_locks(second, "a") == [("a", True, "own", None)]


def test_trying_a_lock_that_producers_hold_leaves_no_share_of_it(connect: Connect) -> None:
    idle, producer, other = connect(autocommit=True), connect(), connect(autocommit=True)
    enqueue(producer)
    assert ask_for_locks(idle, "default") == [("default", True, "free", None)]
    assert ask_for_locks(other, "default") == [("default", False, "free", None)]
    producer.commit()
    assert ask_for_locks(other, "default", topics=["bill"]) == [("default", True, "own", None)]
    assert ask_for_locks(idle, "default") == [("default", True, "other", None)]
    other.execute("SELECT pg_advisory_unlock_all()")
    assert ask_for_locks(idle, "default") == [("default", True, "own", None)]


@pytest.mark.slow
async def test_the_next_heartbeat_detects_a_lock_that_ended_with_its_session(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    second, first = await started(notified), await started(notified)
    assert await first.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert await second.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    second.heard.clear()
    assert first.doorbell._connection is not None
    pid = first.doorbell._connection.pgconn.backend_pid
    # Like after a SIGKILL: the session ends without releasing its lock.
    assert first.doorbell._task is not None
    first.doorbell._task.cancel()
    # Not on the event loop: the other listener's heartbeats must be answered in the meantime.
    await asyncio.to_thread(db.execute, "SELECT pg_terminate_backend(%s, 10000)", (pid,))
    enqueue(db)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await second.heard.wait()
    assert second.queues == ["default"]
    enqueue(db)
    assert await second.queues_so_far() == ["default", "default"]
    # It was locked once, and is released immediately.
    await second.doorbell.release()
    third = await started(notified)
    assert await third.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert third.doorbell._wake_up_locks == {"default"}


async def test_two_concurrent_requests_for_a_lock_take_it_once(
    notified: Callable[..., Notified], connect: Connect
) -> None:
    idle, doorbell = connect(autocommit=True), (await started(notified)).doorbell
    assert ask_for_locks(idle, "default") == [("default", True, "own", None)]
    assert await doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    assert doorbell._relied_on == {"default"}
    idle.execute("SELECT pg_advisory_unlock_all()")

    async def acquire_after_news() -> None:
        doorbell._relied_on.clear()
        await doorbell.acquire(["default"])

    await asyncio.gather(doorbell._recheck(), acquire_after_news())
    assert doorbell._wake_up_locks == {"default"}
    # A session that has locked twice still holds the lock after one release.
    await doorbell.release_wake_up_locks()
    assert ask_for_locks(idle, "default", topics=["bill"]) == [("default", True, "own", None)]


async def test_acquiring_without_a_listener_reports_that(notified: Callable[..., Notified]) -> None:
    one = notified()
    assert await one.doorbell.acquire(["default"]) is LockAnswer.NO_LISTENER
    assert not one.doorbell.is_up


async def test_a_lost_listener_reconnects_without_locks_and_reports_missed_notifications(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    one = await started(notified)
    await one.doorbell.acquire(["default"])
    terminate_listeners(db)
    async with asyncio.timeout(PATIENCE_SECONDS):
        # Once at the loss, so that the worker polls, and once after the reconnect.
        while len(one.queues) < 2:
            one.heard.clear()
            await one.heard.wait()
    assert one.queues == [None, None]
    assert (one.telemetry.counts[LogEvent.LISTENER_LOST], one.telemetry.counts[LogEvent.LISTENER_BACK]) == (
        1,
        1,
    )
    assert await one.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    enqueue(db)
    assert await one.queues_so_far() == [None, None, "default"]


async def test_a_session_that_no_longer_listens_is_abandoned(
    notified: Callable[..., Notified], db: psycopg.Connection
) -> None:
    one = await started(notified)
    connection = one.doorbell._connection
    assert connection is not None
    await one.doorbell._ask("UNLISTEN *", {})
    await one.doorbell._heartbeat()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await one.heard.wait()
    assert one.telemetry.counts[LogEvent.LISTENER_LOST] == 1
    assert await one.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED


def terminate_listeners(db: psycopg.Connection) -> int:
    """Terminate every listener of the database, and return their number."""
    return len(
        db.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgoutbox listen'"
        ).fetchall()
    )


# --- workers ----------------------------------------------------------------------------------------------------------


class Receiver:
    """An outbox that records its deliveries."""

    def __init__(self, dsn: str) -> None:
        self.outbox = Outbox(settings_for(dsn))
        self.delivered: list[int] = []
        self.heard = asyncio.Event()

        @self.outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            self.delivered.append(message.id)
            self.heard.set()


async def test_a_sleeping_worker_is_woken_by_a_commit(dsn: str, db: psycopg.Connection) -> None:
    receiver = Receiver(dsn)
    worker = WatchedWorker(receiver.outbox)
    async with running(worker):
        for _ in range(3):
            await worker.asleep.wait()
            worker.asleep.clear()
            receiver.heard.clear()
            enqueue(db)
            await receiver.heard.wait()
    assert len(receiver.delivered) == 3


async def test_a_worker_finds_a_message_of_a_late_commit(dsn: str, connect: Connect, db: psycopg.Connection) -> None:
    receiver, producer = Receiver(dsn), connect()
    late = enqueue(producer)
    early = enqueue(db)
    worker = WatchedWorker(receiver.outbox)
    async with running(worker):
        await receiver.heard.wait()
        receiver.heard.clear()
        producer.commit()
        await receiver.heard.wait()
    assert receiver.delivered == [early, late]


@pytest.mark.slow
async def test_a_worker_wakes_for_a_message_that_falls_due(dsn: str, db: psycopg.Connection) -> None:
    receiver = Receiver(dsn)
    message_id = enqueue(db, notify=False)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '100 ms'")
    async with running(Worker(receiver.outbox)):
        await receiver.heard.wait()
    assert receiver.delivered == [message_id]


@pytest.mark.slow
async def test_a_sleeping_worker_wakes_for_a_scheduled_message(dsn: str, db: psycopg.Connection) -> None:
    receiver = Receiver(dsn)
    worker = WatchedWorker(receiver.outbox)
    async with running(worker):
        await worker.sleeping.wait()
        scheduled = enqueue(db, available_at=datetime.now(UTC) + timedelta(milliseconds=200))
        await until(lambda: scheduled in receiver.delivered)


@pytest.mark.slow
async def test_a_commit_during_a_listener_outage_is_found_after_the_reconnect(
    dsn: str, server: Server, db: psycopg.Connection
) -> None:
    receiver = Receiver(dsn)
    worker = WatchedWorker(receiver.outbox)
    gate = psycopg.connect(server.dsn_for(server.maintenance_dbname), autocommit=True)
    with reports() as heard, contextlib.closing(gate):
        async with running(worker):
            await worker.asleep.wait()
            allow_connections(gate, db.info.dbname, "false")
            assert terminate_listeners(db) == 1
            message_id = enqueue(db)
            await heard.wait_for(LogEvent.LISTENER_LOST)
            allow_connections(gate, db.info.dbname, "true")
            await heard.wait_for(LogEvent.LISTENER_BACK)
            await receiver.heard.wait()
    assert state_of(db, message_id) == State.SENT


def allow_connections(gate: psycopg.Connection, database: str, answer: str) -> None:
    """Forbid or allow new connections to the database; existing ones stay."""
    gate.execute(
        psycopg.sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(
            psycopg.sql.Identifier(database), psycopg.sql.SQL("true" if answer == "true" else "false")
        )
    )


async def test_a_notification_during_an_empty_poll_is_not_forgotten(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A false notification wakes the worker. A message commits before its claim, which finds nothing, returns."""
    receiver = Receiver(dsn)
    worker = WatchedWorker(receiver.outbox)
    claim_once, note_notification = Store.claim, Signals.note_notification
    was_notified, gate_is_open = asyncio.Event(), False

    async def claim_and_miss(self: Store, queue: str, **options: object) -> object:
        nonlocal gate_is_open
        rows = await claim_once(self, queue, **options)  # type: ignore[arg-type] # passed on as they came
        if gate_is_open:
            gate_is_open = False
            was_notified.clear()
            enqueue(db)
            await was_notified.wait()
        return rows

    def note_and_tell(self: Signals, queue: str | None, /, *, is_new: bool = False) -> None:
        note_notification(self, queue, is_new=is_new)
        was_notified.set()

    monkeypatch.setattr(Store, "claim", claim_and_miss)
    monkeypatch.setattr(Signals, "note_notification", note_and_tell)
    async with running(worker):
        await worker.asleep.wait()
        worker.asleep.clear()
        gate_is_open = True
        db.execute(sql.NOTIFY_WORKERS, {"queues": ["default"]})
        await first_of(receiver.heard, worker.asleep)
        assert receiver.heard.is_set()


async def test_continuous_notifications_do_not_keep_a_worker_from_its_retries(dsn: str, db: psycopg.Connection) -> None:
    """A notification makes it poll fresh messages first. The next one arrives while a message is handled."""
    outbox = Outbox(settings_for(dsn, concurrency=1))
    retried = asyncio.Event()

    async def be_notified() -> None:
        message_id = enqueue(db)
        db.execute(sql.NOTIFY_WORKERS, {"queues": ["default"]})
        # A worker that prefetches may answer at once.
        await until(lambda: run_of(worker).state.signals.is_notified or state_of(db, message_id) == State.SENDING)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if not retried.is_set():
            await be_notified()

    @outbox.handler("bill", retry=RetryPolicy.steps(0, jitter=0))
    async def bill(message: Message, ctx: Context) -> None:
        if message.attempt_count == 1:
            await be_notified()
            raise Transient("busy")
        retried.set()

    worker = Worker(outbox)
    enqueue(db, "bill")
    async with running(worker):
        await retried.wait()


async def test_a_worker_does_not_rely_on_a_lock_that_is_released_while_it_asks(
    dsn: str,
    connect: Connect,
    db: psycopg.Connection,
    notified: Callable[..., Notified],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The release is notified together with the answer that the lock is held; an enqueue is open in the meantime."""
    first = await started(notified)
    assert await first.doorbell.acquire(["default"]) is LockAnswer.ACQUIRED
    receiver, producer = Receiver(dsn), connect()
    worker = WatchedWorker(receiver.outbox)
    asked_again = asyncio.Event()
    answers: list[LockAnswer] = []
    acquire = Doorbell.acquire

    async def acquire_and_note(self: Doorbell, queues: Sequence[str]) -> LockAnswer:
        answers.append(await acquire(self, queues))
        if answers[1:]:
            asked_again.set()
        return answers[-1]

    monkeypatch.setattr(sql, "ACQUIRE_LOCKS", GATED_ACQUIRE)
    monkeypatch.setattr(Doorbell, "acquire", acquire_and_note)
    db.execute("SELECT pg_advisory_lock(1)")
    async with running(worker):
        asleep: asyncio.Task[object] = asyncio.create_task(worker.asleep.wait())
        await until_blocked(db, asleep)
        asleep.cancel()
        await first.doorbell.release()
        enqueue(producer)
        db.execute("SELECT pg_advisory_unlock(1)")
        await first_of(asked_again, worker.asleep)
        producer.commit()
        await first_of(receiver.heard, worker.asleep)
        assert receiver.heard.is_set(), answers


async def test_a_worker_that_only_polls_acquires_no_lock(dsn: str, db: psycopg.Connection) -> None:
    receiver = Receiver(dsn)
    worker = WatchedWorker(receiver.outbox, settings=settings_for(dsn, listen=False, poll_interval_seconds=0.1))
    async with running(worker):
        await worker.asleep.wait()
        held = db.execute(f"SELECT count(*) FROM {ADVISORY_LOCKS} WHERE l.classid = 1885826146")
        assert held.fetchone() == (0,)
        message_id = enqueue(db)
        await receiver.heard.wait()
    assert receiver.delivered == [message_id]


@pytest.mark.slow
@pytest.mark.parametrize("surplus", [0, 8])
async def test_a_full_worker_leaves_its_watch_to_an_idle_worker(
    dsn: str, connect: Connect, db: psycopg.Connection, surplus: int
) -> None:
    """Its claim filled the room, or claimed so many that they wait for their handlers."""
    go_on = asyncio.Event()
    busy_outbox = Outbox(settings_for(dsn, concurrency=1))

    @busy_outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        await go_on.wait()

    receiver, producer = Receiver(dsn), connect()
    busy, idle = WatchedWorker(busy_outbox), WatchedWorker(receiver.outbox)
    async with running(busy):
        await busy.sleeping.wait()
        async with running(idle):
            await idle.sleeping.wait()
            watch, successor = doorbell_of(busy), doorbell_of(idle)
            assert (watch.has_wake_up_lock, successor.has_wake_up_lock) == (True, False)
            run_of(busy).poll_loop.surplus = surplus
            for _ in range(1 + surplus * 3 // 4):
                enqueue(producer)
            producer.commit()
            await until(lambda: successor.has_wake_up_lock)
            message_id = enqueue(db)
            try:
                await until(lambda: message_id in receiver.delivered)
            finally:
                go_on.set()


@pytest.mark.slow
async def test_a_full_worker_does_not_go_on_watch_when_the_watch_dies(
    dsn: str, db: psycopg.Connection, notified: Callable[..., Notified]
) -> None:
    """It is not on watch, so no other worker would be notified of a release."""
    go_on = asyncio.Event()
    outbox = Outbox(settings_for(dsn, concurrency=1, listener_heartbeat_seconds=600))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        await go_on.wait()

    await (await started(notified)).doorbell.acquire(["default"])
    worker = WatchedWorker(outbox)
    async with running(worker):
        await worker.sleeping.wait()
        doorbell = doorbell_of(worker)
        assert not doorbell.is_on_watch
        enqueue(db, notify=False)
        # Its own call for help would end the trust as well.
        run_of(worker).state.notifier.notified_at = elapsed_clock() + 3600
        run_of(worker).state.signals.poll_all_lanes()
        await until(lambda: len(run_of(worker).state.in_flight) == 1 and not doorbell._relied_on)
        # Only of this database: other tests use the same server.
        db.execute(
            "SELECT pg_terminate_backend(l.pid, 10000) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database "
            "WHERE l.locktype = 'advisory' AND d.datname = current_database()"
        )
        await doorbell._recheck()
        assert not doorbell.is_on_watch
        go_on.set()


@pytest.mark.slow
async def test_one_message_wakes_the_watch_and_then_costs_one_look(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(dsn)
    watch, looking, spared = [WatchedWorker(receiver.outbox) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for worker in (watch, looking, spared):
            await stack.enter_async_context(running(worker))
            await worker.sleeping.wait()
        queues = [run_of(worker).state.queues for worker in (watch, looking, spared)]
        polled_at = [queue.polled_at for queue in queues]
        monkeypatch.setattr(pgoutbox.worker.doorbell, "_LOOK_SECONDS", (3600, 3600))
        first, second = doorbell_of(looking), doorbell_of(spared)
        enqueue(db)
        await receiver.heard.wait()
        await until(lambda: first._unanswered == second._unanswered == {"default"})
        first._look()
        await until(lambda: queues[1].polled_at > polled_at[1] and second._unanswered == set())
        assert queues[0].polled_at > polled_at[0]
        assert queues[2].polled_at == polled_at[2]
        assert watch.telemetry.counts[LogEvent.CLAIMED] == 1


@pytest.mark.slow
@pytest.mark.parametrize("polls", [False, True])
async def test_a_message_that_the_watch_misses_is_found_by_another_idle_worker(
    dsn: str, db: psycopg.Connection, notified: Callable[..., Notified], *, polls: bool
) -> None:
    watch, receiver = await started(notified), Receiver(dsn)
    await watch.doorbell.acquire(["default"])
    worker = WatchedWorker(receiver.outbox)
    async with running(worker):
        await worker.sleeping.wait()
        if polls:
            await watch.doorbell.release_wake_up_locks()
            # It polls once for that, and repeatedly because no session has the wake-up lock.
            await until(lambda: not doorbell_of(worker)._relied_on)
            await worker.polls_and_sleeps()
        message_id = enqueue(db)
        await receiver.heard.wait()
    assert receiver.delivered == [message_id]


@pytest.mark.slow
async def test_a_scheduled_message_that_the_watch_misses_wakes_another_worker_at_its_time(
    dsn: str, db: psycopg.Connection, notified: Callable[..., Notified]
) -> None:
    watch, receiver = await started(notified), Receiver(dsn)
    await watch.doorbell.acquire(["default"])
    async with running(worker := WatchedWorker(receiver.outbox)):
        await worker.sleeping.wait()
        scheduled = enqueue(db, available_at=datetime.now(UTC) + timedelta(seconds=1.5))
        await receiver.heard.wait()
    assert receiver.delivered == [scheduled]


@pytest.mark.slow
async def test_producers_do_not_notify_while_work_is_continuous(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    receiver, listener = Receiver(dsn), connect(autocommit=True)
    listener.execute(sql.LISTEN)
    heard: list[str] = []

    def notifications() -> list[str]:
        listener.execute("SELECT")
        heard.extend(notify.payload for notify in listener.notifies(timeout=0))
        return heard

    worker = WatchedWorker(receiver.outbox)
    async with running(worker):
        doorbell = doorbell_of(worker)
        await until(lambda: doorbell.has_wake_up_lock)
        run_of(worker).poll_loop.woken_at.extend([elapsed_clock() + 3600] * 8)
        run_of(worker).state.signals.wake.set()
        await until(lambda: "released default" in notifications())
        assert doorbell.is_on_watch
        message_id = enqueue(db)
        await receiver.heard.wait()
        assert notifications() == ["released default"]
        run_of(worker).poll_loop.woken_at.clear()
        await until(lambda: doorbell.has_wake_up_lock)
    assert receiver.delivered == [message_id]


async def test_many_notifications_for_other_queues_do_not_wake_a_worker(dsn: str, db: psycopg.Connection) -> None:
    receiver = Receiver(dsn)
    worker = WatchedWorker(receiver.outbox, queues=["quiet"])
    async with running(worker):
        await worker.asleep.wait()
        worker.asleep.clear()
        for _ in range(100):
            db.execute("SELECT pg_notify('pgoutbox', 'loud')")
        message_id = enqueue(db, queue="quiet")
        assert not worker.asleep.is_set()
        await receiver.heard.wait()
    assert receiver.delivered == [message_id]
