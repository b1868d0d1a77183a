"""Tests the doorbell: no commit is missed, and no commit rings while no worker sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import psycopg
import psycopg.sql
import pytest

from pgoutbox import Outbox
from pgoutbox.clock import elapsed_clock
from pgoutbox.database import sql
from pgoutbox.database.store import Store
from pgoutbox.handlers import Context
from pgoutbox.message import Message, State, Transient
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from pgoutbox.worker.claim_planner import parse_queues
from pgoutbox.worker.doorbell import Bell, Doorbell
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    WatchedWorker,
    ask_for_bells,
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
GATED_ARM = f"""
    WITH answer(queue, bell, permit_seconds) AS MATERIALIZED ({sql.ARM})
    SELECT queue, bell, permit_seconds FROM answer WHERE pg_advisory_lock_shared(1) IS NOT NULL
"""


class Bellman:
    """A doorbell and its rings; `checked` is set when a deputy should poll."""

    def __init__(self, dsn: str, topics: Sequence[str]) -> None:
        self.rings: list[str | None] = []
        self.rang = asyncio.Event()
        self.checked = asyncio.Event()
        self.telemetry = Telemetry(logging.getLogger("pgoutbox.test"))
        self.topics = list(topics)
        self.bell = Doorbell(
            settings_for(dsn),
            self.topics,
            on_ring=self._on_ring,
            on_check=self.checked.set,
            telemetry=self.telemetry,
        )

    def _on_ring(self, queue: str | None, /, *, is_new: bool = False) -> None:
        self.rings.append(queue)
        self.rang.set()

    async def rings_so_far(self) -> list[str | None]:
        """Return the rings so far. The answer to a heartbeat arrives after every ring in transit."""
        await self.bell._probe()
        return self.rings


@pytest.fixture
async def bellmen(dsn: str) -> AsyncIterator[Callable[..., Bellman]]:
    """Create doorbells, and stop them when the test ends. The test starts them."""
    made: list[Bellman] = []

    def make(*topics: str) -> Bellman:
        made.append(Bellman(dsn, topics or ["greet"]))
        return made[-1]

    yield make
    for bellman in made:
        await bellman.bell.stop()


async def started(bellmen: Callable[..., Bellman], *topics: str) -> Bellman:
    bellman = bellmen(*topics)
    await bellman.bell.start()
    return bellman


async def test_an_enqueue_does_not_ring_while_no_worker_sleeps(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    bellman = await started(bellmen)
    enqueue(db)
    assert await bellman.rings_so_far() == []


async def test_every_commit_rings_while_the_bell_is_armed(
    bellmen: Callable[..., Bellman], connect: Connect, db: psycopg.Connection
) -> None:
    bellman, rolling_back = await started(bellmen), connect()
    assert await bellman.bell.arm(["default"]) is Bell.ARMED
    enqueue(db)
    enqueue(db)
    enqueue(rolling_back)
    rolling_back.rollback()
    assert await bellman.rings_so_far() == ["default", "default"]


async def test_the_ring_contains_only_the_queue(bellmen: Callable[..., Bellman], db: psycopg.Connection) -> None:
    bellman = await started(bellmen)
    await bellman.bell.arm(["default", "bulk"])
    enqueue(db, queue="bulk", payload={"secret": "s3cret"})
    enqueue(db, queue="other")
    assert await bellman.rings_so_far() == ["bulk"]


async def test_an_enqueue_can_request_no_ring(bellmen: Callable[..., Bellman], db: psycopg.Connection) -> None:
    bellman = await started(bellmen)
    await bellman.bell.arm(["default"])
    enqueue(db, notify=False)
    assert await bellman.rings_so_far() == []


async def test_arming_reports_open_enqueues_until_they_have_committed(
    bellmen: Callable[..., Bellman], connect: Connect
) -> None:
    bellman, producer = await started(bellmen), connect()
    enqueue(producer)
    assert await bellman.bell.arm(["default"]) is Bell.PRODUCERS
    producer.commit()
    assert await bellman.bell.arm(["default"]) is Bell.ARMED
    assert await bellman.bell.arm(["default"]) is Bell.STILL_ARMED


async def test_of_two_sleepers_the_one_on_watch_is_rung(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    first, second = await started(bellmen), await started(bellmen)
    assert await first.bell.arm(["default"]) is Bell.ARMED
    assert await second.bell.arm(["default"]) is Bell.ARMED
    enqueue(db)
    assert (await first.rings_so_far(), await second.rings_so_far()) == (["default"], [])
    assert await second.bell.arm(["default"]) is Bell.STILL_ARMED


async def test_of_the_other_sleepers_one_polls_after_the_watch_had_time_to_answer(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    watch, deputy, sleeper = [await started(bellmen) for _ in range(3)]
    for bellman in (watch, deputy, sleeper):
        await bellman.bell.arm(["default"])
    enqueue(db)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await deputy.checked.wait()
    assert not watch.checked.is_set()
    assert not sleeper.checked.is_set()
    assert (await watch.rings_so_far(), await deputy.rings_so_far(), await sleeper.rings_so_far()) == (
        ["default"],
        [],
        [],
    )


async def test_the_watches_of_different_topics_are_both_rung(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    first, second = await started(bellmen, "greet"), await started(bellmen, "greet", "bill")
    await first.bell.arm(["default"])
    await second.bell.arm(["default"])
    enqueue(db)
    assert (await first.rings_so_far(), await second.rings_so_far()) == (["default"], ["default"])


async def test_an_enqueue_does_not_ring_while_the_watch_polls(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    watch, deputy = await started(bellmen), await started(bellmen)
    await watch.bell.arm(["default"])
    await deputy.bell.arm(["default"])
    await watch.bell.lower()
    assert watch.bell.is_on_watch
    enqueue(db)
    assert (await watch.rings_so_far(), await deputy.rings_so_far()) == ([], [])
    # The deputy has heard of it, and polls in place of the watch.
    async with asyncio.timeout(PATIENCE_SECONDS):
        await deputy.checked.wait()
    assert await deputy.bell.arm(["default"]) is Bell.ARMED
    assert deputy.bell.unarmed_seconds is not None
    enqueue(db)
    assert (await watch.rings_so_far(), await deputy.rings_so_far()) == ([], [])
    assert await watch.bell.arm(["default"]) is Bell.ARMED
    assert await deputy.bell.arm(["default"]) is Bell.ARMED
    assert deputy.bell.unarmed_seconds is None


async def test_a_bell_lowered_while_a_deputy_asks_for_it_makes_it_ask_again(
    bellmen: Callable[..., Bellman], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notification arrives with the answer that the watch has armed the bell."""
    watch, deputy = await started(bellmen), await started(bellmen)
    await watch.bell.arm(["default"])
    monkeypatch.setattr(sql, "ARM", GATED_ARM)
    db.execute("SELECT pg_advisory_lock(1)")
    asking: asyncio.Task[object] = asyncio.create_task(deputy.bell.arm(["default"]))
    await until_blocked(db, asking)
    await watch.bell.lower()
    db.execute("SELECT pg_advisory_unlock(1)")
    await asking
    assert deputy.rings == ["default"]
    assert deputy.bell.unarmed_seconds is None
    assert await deputy.bell.arm(["default"]) is Bell.ARMED
    assert deputy.bell.unarmed_seconds is not None


async def test_a_lowered_bell_is_taken_over_by_the_watch_of_other_topics(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    first, second = await started(bellmen, "greet"), await started(bellmen, "bill")
    await first.bell.arm(["default"])
    await second.bell.arm(["default"])
    assert (first.bell.is_armed, second.bell.is_armed) == (True, False)
    await first.bell.lower()
    assert await second.rings_so_far() == ["default"]
    assert await second.bell.arm(["default"]) is Bell.ARMED
    assert second.bell.is_armed
    enqueue(db)
    assert await second.rings_so_far() == ["default", "default"]


async def test_a_worker_whose_topics_change_leaves_its_watch_to_others(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    first, second = await started(bellmen, "greet", "bill"), await started(bellmen, "greet", "bill")
    await first.bell.arm(["default"])
    await second.bell.arm(["default"])
    first.topics.remove("greet")
    assert await first.bell.arm(["default"]) is Bell.ARMED
    assert await second.rings_so_far() == ["default"]
    assert await second.bell.arm(["default"]) is Bell.ARMED
    enqueue(db)
    assert await second.rings_so_far() == ["default", "default"]


async def test_a_released_bell_wakes_the_other_sleepers_and_rings_no_more(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    first, second = await started(bellmen), await started(bellmen)
    await first.bell.arm(["default"])
    await second.bell.arm(["default"])
    await first.bell.disarm()
    assert (await first.rings_so_far(), await second.rings_so_far()) == ([], ["default"])
    assert not second.bell.is_armed
    enqueue(db)
    assert (await first.rings_so_far(), await second.rings_so_far()) == ([], ["default"])
    assert await second.bell.arm(["default"]) is Bell.ARMED
    enqueue(db)
    assert await second.rings_so_far() == ["default", "default"]


def test_the_bells_of_two_queues_are_two_locks(connect: Connect) -> None:
    sleeper, other = connect(autocommit=True), connect(autocommit=True)
    assert ask_for_bells(sleeper, "a") == [("a", "armed", None)]
    assert ask_for_bells(other, "a", "b") == [("a", "deputy", None), ("b", "armed", None)]


def test_each_post_belongs_to_one_session(connect: Connect) -> None:
    sessions = [connect(autocommit=True) for _ in range(4)]
    assert [ask_for_bells(session, "a")[0][1] for session in sessions] == ["armed", "deputy", "sleeper", "sleeper"]
    sessions[0].execute(sql.LOWER, {"queues": ["a"]})
    assert ask_for_bells(sessions[1], "a", deputy_of=["a"]) == [("a", "polled", None)]
    assert ask_for_bells(sessions[2], "a") == [("a", "sleeper", None)]
    assert ask_for_bells(sessions[0], "a") == [("a", "armed", None)]
    sessions[0].execute(sql.DISARM, {"queues": ["a"]})
    # A deputy that goes on watch leaves its post to the next worker.
    assert ask_for_bells(sessions[1], "a", deputy_of=["a"]) == [("a", "armed", None)]
    assert ask_for_bells(sessions[3], "a") == [("a", "deputy", None)]
    assert ask_for_bells(sessions[2], "a", topics=["bill"]) == [("a", "rung", None)]


def test_trying_a_bell_that_producers_hold_leaves_no_share_of_the_lock(connect: Connect) -> None:
    sleeper, producer, other = connect(autocommit=True), connect(), connect(autocommit=True)
    enqueue(producer)
    assert ask_for_bells(sleeper, "default") == [("default", "producers", None)]
    assert ask_for_bells(other, "default") == [("default", "polled", None)]
    producer.commit()
    assert ask_for_bells(other, "default", topics=["bill"]) == [("default", "armed", None)]
    assert ask_for_bells(sleeper, "default") == [("default", "rung", None)]
    other.execute("SELECT pg_advisory_unlock_all()")
    assert ask_for_bells(sleeper, "default") == [("default", "armed", None)]


@pytest.mark.slow
async def test_the_next_heartbeat_detects_a_bell_that_ended_with_its_session(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    second, first = await started(bellmen), await started(bellmen)
    assert await first.bell.arm(["default"]) is Bell.ARMED
    assert await second.bell.arm(["default"]) is Bell.ARMED
    second.rang.clear()
    assert first.bell._connection is not None
    pid = first.bell._connection.pgconn.backend_pid
    # Like after a SIGKILL: the session ends without releasing its bell.
    assert first.bell._task is not None
    first.bell._task.cancel()
    # Not on the event loop: the other listener's heartbeats must be answered in the meantime.
    await asyncio.to_thread(db.execute, "SELECT pg_terminate_backend(%s, 10000)", (pid,))
    enqueue(db)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await second.rang.wait()
    assert second.rings == ["default"]
    enqueue(db)
    assert await second.rings_so_far() == ["default", "default"]
    # It was locked once, and is released immediately.
    await second.bell.disarm()
    third = await started(bellmen)
    assert await third.bell.arm(["default"]) is Bell.ARMED
    assert third.bell._armed == {"default"}


async def test_two_concurrent_requests_for_a_bell_lock_it_once(
    bellmen: Callable[..., Bellman], connect: Connect
) -> None:
    sleeper, bell = connect(autocommit=True), (await started(bellmen)).bell
    assert ask_for_bells(sleeper, "default") == [("default", "armed", None)]
    assert await bell.arm(["default"]) is Bell.ARMED
    assert bell._trusted == {"default"}
    sleeper.execute("SELECT pg_advisory_unlock_all()")

    async def arm_after_news() -> None:
        bell._trusted.clear()
        await bell.arm(["default"])

    await asyncio.gather(bell._doubt(), arm_after_news())
    assert bell._armed == {"default"}
    # A session that has locked twice still holds the lock after one release.
    await bell.lower()
    assert ask_for_bells(sleeper, "default", topics=["bill"]) == [("default", "armed", None)]


async def test_arming_without_a_listener_reports_that(bellmen: Callable[..., Bellman]) -> None:
    bellman = bellmen()
    assert await bellman.bell.arm(["default"]) is Bell.DOWN
    assert not bellman.bell.is_up


async def test_a_lost_listener_reconnects_without_bells_and_rings_for_missed_notifications(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    bellman = await started(bellmen)
    await bellman.bell.arm(["default"])
    terminate_listeners(db)
    async with asyncio.timeout(PATIENCE_SECONDS):
        # Once at the loss, so that the worker polls, and once after the reconnect.
        while len(bellman.rings) < 2:
            bellman.rang.clear()
            await bellman.rang.wait()
    assert bellman.rings == [None, None]
    assert (bellman.telemetry.counts[LogEvent.LISTENER_LOST], bellman.telemetry.counts[LogEvent.LISTENER_BACK]) == (
        1,
        1,
    )
    assert await bellman.bell.arm(["default"]) is Bell.ARMED
    enqueue(db)
    assert await bellman.rings_so_far() == [None, None, "default"]


async def test_a_session_that_no_longer_listens_is_abandoned(
    bellmen: Callable[..., Bellman], db: psycopg.Connection
) -> None:
    bellman = await started(bellmen)
    connection = bellman.bell._connection
    assert connection is not None
    await bellman.bell._ask("UNLISTEN *", {})
    await bellman.bell._probe()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await bellman.rang.wait()
    assert bellman.telemetry.counts[LogEvent.LISTENER_LOST] == 1
    assert await bellman.bell.arm(["default"]) is Bell.ARMED


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


async def test_a_worker_wakes_for_a_message_that_falls_due(dsn: str, db: psycopg.Connection) -> None:
    receiver = Receiver(dsn)
    message_id = enqueue(db, notify=False)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '100 ms'")
    async with running(Worker(receiver.outbox)):
        await receiver.heard.wait()
    assert receiver.delivered == [message_id]


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


async def test_a_ring_during_an_empty_poll_is_not_forgotten(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spurious ring wakes the worker, whose claim finds nothing. A message commits before that claim has returned."""
    receiver = Receiver(dsn)
    worker = WatchedWorker(receiver.outbox)
    claim_once, on_ring = Store.claim, Worker._on_ring
    rung, gate_is_open = asyncio.Event(), False

    async def claim_and_miss(self: Store, queue: str, **options: object) -> object:
        nonlocal gate_is_open
        rows = await claim_once(self, queue, **options)  # type: ignore[arg-type] # passed on as they came
        if gate_is_open:
            gate_is_open = False
            rung.clear()
            enqueue(db)
            await rung.wait()
        return rows

    def note_ring(self: Worker, queue: str | None, /, *, is_new: bool = False) -> None:
        on_ring(self, queue, is_new=is_new)
        rung.set()

    monkeypatch.setattr(Store, "claim", claim_and_miss)
    monkeypatch.setattr(Worker, "_on_ring", note_ring)
    async with running(worker):
        await worker.asleep.wait()
        worker.asleep.clear()
        gate_is_open = True
        db.execute(sql.NOTIFY_WORKERS, {"queues": ["default"]})
        await first_of(receiver.heard, worker.asleep)
        assert receiver.heard.is_set()


async def test_continuous_rings_do_not_keep_a_worker_from_its_retries(dsn: str, db: psycopg.Connection) -> None:
    """A ring makes it poll fresh messages first, and while one is handled, the next ring arrives."""
    outbox = Outbox(settings_for(dsn, concurrency=1))
    retried = asyncio.Event()

    async def be_rung() -> None:
        message_id = enqueue(db)
        db.execute(sql.NOTIFY_WORKERS, {"queues": ["default"]})
        # A worker that prefetches may answer at once.
        await until(lambda: worker._ring_is_unanswered or state_of(db, message_id) == State.SENDING)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if not retried.is_set():
            await be_rung()

    @outbox.handler("bill", retry=RetryPolicy.steps(0, jitter=0))
    async def bill(message: Message, ctx: Context) -> None:
        if message.attempt_count == 1:
            await be_rung()
            raise Transient("busy")
        retried.set()

    worker = Worker(outbox)
    enqueue(db, "bill")
    async with running(worker):
        await retried.wait()


async def test_a_bell_released_while_a_sleeper_asks_for_it_is_not_trusted(
    dsn: str,
    connect: Connect,
    db: psycopg.Connection,
    bellmen: Callable[..., Bellman],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The release is notified together with the answer that the bell is held; an enqueue is open in the meantime."""
    first = await started(bellmen)
    assert await first.bell.arm(["default"]) is Bell.ARMED
    receiver, producer = Receiver(dsn), connect()
    worker = WatchedWorker(receiver.outbox)
    asked_again = asyncio.Event()
    answers: list[Bell] = []
    arm = Doorbell.arm

    async def arm_and_note(self: Doorbell, queues: Sequence[str]) -> Bell:
        answers.append(await arm(self, queues))
        if answers[1:]:
            asked_again.set()
        return answers[-1]

    monkeypatch.setattr(sql, "ARM", GATED_ARM)
    monkeypatch.setattr(Doorbell, "arm", arm_and_note)
    db.execute("SELECT pg_advisory_lock(1)")
    async with running(worker):
        asleep: asyncio.Task[object] = asyncio.create_task(worker.asleep.wait())
        await until_blocked(db, asleep)
        asleep.cancel()
        await first.bell.disarm()
        enqueue(producer)
        db.execute("SELECT pg_advisory_unlock(1)")
        await first_of(asked_again, worker.asleep)
        producer.commit()
        await first_of(receiver.heard, worker.asleep)
        assert receiver.heard.is_set(), answers


async def test_a_worker_that_only_polls_arms_no_bell(dsn: str, db: psycopg.Connection) -> None:
    receiver = Receiver(dsn)
    worker = WatchedWorker(receiver.outbox, settings=settings_for(dsn, listen=False, poll_interval_seconds=0.1))
    async with running(worker):
        await worker.asleep.wait()
        held = db.execute(f"SELECT count(*) FROM {ADVISORY_LOCKS} WHERE l.classid = 1885826146")
        assert held.fetchone() == (0,)
        message_id = enqueue(db)
        await receiver.heard.wait()
    assert receiver.delivered == [message_id]


@pytest.mark.parametrize("surplus", [0, 8])
async def test_a_full_worker_leaves_its_watch_to_a_sleeper(
    dsn: str, connect: Connect, db: psycopg.Connection, surplus: int
) -> None:
    """Its claim filled the room, or claimed so many that they wait for their handlers."""
    go_on = asyncio.Event()
    busy_outbox = Outbox(settings_for(dsn, concurrency=1))

    @busy_outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        await go_on.wait()

    receiver, producer = Receiver(dsn), connect()
    busy, sleeper = WatchedWorker(busy_outbox), WatchedWorker(receiver.outbox)
    async with running(busy):
        await busy.sleeping.wait()
        async with running(sleeper):
            await sleeper.sleeping.wait()
            watch, successor = busy._bell, sleeper._bell
            assert watch is not None
            assert successor is not None
            assert (watch.is_armed, successor.is_armed) == (True, False)
            busy._prefetch = surplus
            for _ in range(1 + surplus * 3 // 4):
                enqueue(producer)
            producer.commit()
            await until(lambda: successor.is_armed)
            message_id = enqueue(db)
            try:
                await until(lambda: message_id in receiver.delivered)
            finally:
                go_on.set()


async def test_a_full_worker_does_not_go_on_watch_when_the_watch_dies(
    dsn: str, db: psycopg.Connection, bellmen: Callable[..., Bellman]
) -> None:
    """It has no post, so no other worker would be notified of a release."""
    go_on = asyncio.Event()
    outbox = Outbox(settings_for(dsn, concurrency=1, listener_heartbeat_seconds=600))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        await go_on.wait()

    for _ in range(2):
        await (await started(bellmen)).bell.arm(["default"])
    worker = WatchedWorker(outbox)
    async with running(worker):
        await worker.sleeping.wait()
        bell = worker._bell
        assert bell is not None
        assert not bell.is_on_duty
        enqueue(db, notify=False)
        worker._rang_at = elapsed_clock() + 3600  # Its own call for help would end the trust as well.
        worker._look_at_everything()
        await until(lambda: len(worker._held) == 1 and not bell._trusted)
        # Only of this database: other tests use the same server.
        db.execute(
            "SELECT pg_terminate_backend(l.pid, 10000) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database "
            "WHERE l.locktype = 'advisory' AND d.datname = current_database()"
        )
        await bell._doubt()
        assert not bell.is_on_duty
        go_on.set()


async def test_a_worker_that_halts_a_topic_leaves_its_watch_to_a_sleeper(dsn: str) -> None:
    watch, sleeper = [WatchedWorker(Receiver(dsn).outbox) for _ in range(2)]
    async with running(watch):
        await watch.sleeping.wait()
        async with running(sleeper):
            await sleeper.sleeping.wait()
            successor = sleeper._bell
            assert successor is not None
            assert not successor.is_on_watch
            watch._halt_topic("greet")
            await until(lambda: successor.is_on_watch)


async def test_one_message_wakes_one_worker_and_its_deputy(dsn: str, db: psycopg.Connection) -> None:
    receiver = Receiver(dsn)
    watch, deputy, sleeper = [WatchedWorker(receiver.outbox) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for worker in (watch, deputy, sleeper):
            await stack.enter_async_context(running(worker))
            await worker.sleeping.wait()
        looked_at = [worker._queues.looked_at for worker in (watch, deputy, sleeper)]
        enqueue(db)
        await receiver.heard.wait()
        await until(lambda: deputy._queues.looked_at > looked_at[1])
        assert watch._queues.looked_at > looked_at[0]
        assert sleeper._queues.looked_at == looked_at[2]
        assert watch.telemetry.counts[LogEvent.CLAIMED] == 1


@pytest.mark.parametrize("polls", [False, True])
async def test_a_message_that_the_watch_misses_is_found_by_its_deputy(
    dsn: str, db: psycopg.Connection, bellmen: Callable[..., Bellman], *, polls: bool
) -> None:
    watch, receiver = await started(bellmen), Receiver(dsn)
    await watch.bell.arm(["default"])
    worker = WatchedWorker(receiver.outbox)
    async with running(worker):
        await worker.sleeping.wait()
        if polls:
            await watch.bell.lower()
            # It polls once for that, and repeatedly because it is told that no worker has the bell.
            await until(lambda: worker._bell is not None and bool(worker._bell._polled))
            await worker.falls_asleep()
        message_id = enqueue(db)
        await receiver.heard.wait()
    assert receiver.delivered == [message_id]


async def test_producers_do_not_ring_while_work_is_continuous(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    receiver, listener = Receiver(dsn), connect(autocommit=True)
    listener.execute(sql.LISTEN)
    worker = WatchedWorker(receiver.outbox)
    async with running(worker):
        bell = worker._bell
        assert bell is not None
        await until(lambda: bell.is_armed)
        worker._woken_at.extend([elapsed_clock() + 3600] * 8)
        worker._wake.set()
        await until(lambda: not bell.is_armed)
        assert bell.is_on_watch
        message_id = enqueue(db)
        await receiver.heard.wait()
        listener.execute("SELECT")
        assert [notify.payload for notify in listener.notifies(timeout=0)] == ["lowered default"]
        worker._woken_at.clear()
        await until(lambda: bell.is_armed)
    assert receiver.delivered == [message_id]


async def test_many_rings_for_other_queues_do_not_wake_a_worker(dsn: str, db: psycopg.Connection) -> None:
    receiver = Receiver(dsn)
    worker = WatchedWorker(receiver.outbox, queues=parse_queues(["quiet"]))
    async with running(worker):
        await worker.asleep.wait()
        worker.asleep.clear()
        for _ in range(100):
            db.execute("SELECT pg_notify('pgoutbox', 'loud')")
        message_id = enqueue(db, queue="quiet")
        assert not worker.asleep.is_set()
        await receiver.heard.wait()
    assert receiver.delivered == [message_id]
