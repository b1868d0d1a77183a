"""The doorbell: no commit is missed, and none rings while nobody sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import psycopg
import psycopg.sql
import pytest

from pgoutbox import Outbox, sql
from pgoutbox.dispatch import Context
from pgoutbox.doorbell import Bell, Doorbell
from pgoutbox.lanes import parse_queues
from pgoutbox.message import Message, State, Transient
from pgoutbox.retry import RetryPolicy
from pgoutbox.store import Store
from pgoutbox.telemetry import Event, Telemetry
from pgoutbox.worker import Worker
from tests.outbox_actions import (
    PATIENCE_SECONDS,
    WatchedWorker,
    enqueue,
    first_of,
    reports,
    running,
    settings_for,
    state_of,
    until_blocked,
)
from tests.races import ADVISORY_LOCKS
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tests.conftest import Connect, Server


class Bellman:
    """A doorbell and what it rang."""

    def __init__(self, dsn: str) -> None:
        self.rings: list[str | None] = []
        self.rang = asyncio.Event()
        self.telemetry = Telemetry(logging.getLogger("pgoutbox.test"))
        self.bell = Doorbell(settings_for(dsn), self._on_ring, self.telemetry)

    def _on_ring(self, queue: str | None) -> None:
        self.rings.append(queue)
        self.rang.set()

    async def rings_so_far(self) -> list[str | None]:
        """What rang up to now: the answer to a probe comes behind every ring that is on the way."""
        await self.bell._probe()
        return self.rings


@pytest.fixture
async def bellmen(dsn: str) -> AsyncIterator[Callable[[], Bellman]]:
    """Makes doorbells; they are stopped when the test ends. Start them in the test."""
    made: list[Bellman] = []

    def make() -> Bellman:
        made.append(Bellman(dsn))
        return made[-1]

    yield make
    for bellman in made:
        await bellman.bell.stop()


async def started(bellmen: Callable[[], Bellman]) -> Bellman:
    bellman = bellmen()
    await bellman.bell.start()
    return bellman


async def test_while_nobody_sleeps_an_enqueue_does_not_ring(
    bellmen: Callable[[], Bellman], db: psycopg.Connection
) -> None:
    bellman = await started(bellmen)
    enqueue(db)
    assert await bellman.rings_so_far() == []


async def test_while_the_bell_is_armed_every_commit_rings(
    bellmen: Callable[[], Bellman], connect: Connect, db: psycopg.Connection
) -> None:
    bellman, rolling_back = await started(bellmen), connect()
    assert await bellman.bell.arm(["default"]) is Bell.ARMED
    enqueue(db)
    enqueue(db)
    enqueue(rolling_back)
    rolling_back.rollback()
    assert await bellman.rings_so_far() == ["default", "default"]


async def test_the_ring_names_the_queue_and_nothing_else(
    bellmen: Callable[[], Bellman], db: psycopg.Connection
) -> None:
    bellman = await started(bellmen)
    await bellman.bell.arm(["default", "bulk"])
    enqueue(db, queue="bulk", payload={"secret": "s3cret"})
    enqueue(db, queue="other")
    assert await bellman.rings_so_far() == ["bulk"]


async def test_an_enqueue_may_ask_not_to_ring(bellmen: Callable[[], Bellman], db: psycopg.Connection) -> None:
    bellman = await started(bellmen)
    await bellman.bell.arm(["default"])
    enqueue(db, notify=False)
    assert await bellman.rings_so_far() == []


async def test_arming_tells_of_enqueues_under_way_until_they_have_committed(
    bellmen: Callable[[], Bellman], connect: Connect
) -> None:
    bellman, producer = await started(bellmen), connect()
    enqueue(producer)
    assert await bellman.bell.arm(["default"]) is Bell.PRODUCERS
    producer.commit()
    assert await bellman.bell.arm(["default"]) is Bell.ARMED
    assert await bellman.bell.arm(["default"]) is Bell.STILL_ARMED


async def test_a_second_sleeper_trusts_in_the_bell_of_the_first(
    bellmen: Callable[[], Bellman], db: psycopg.Connection
) -> None:
    first, second = await started(bellmen), await started(bellmen)
    assert await first.bell.arm(["default"]) is Bell.ARMED
    assert await second.bell.arm(["default"]) is Bell.ARMED
    enqueue(db)
    assert (await first.rings_so_far(), await second.rings_so_far()) == (["default"], ["default"])


async def test_a_bell_that_is_given_up_wakes_the_other_sleepers_and_rings_no_more(
    bellmen: Callable[[], Bellman], db: psycopg.Connection
) -> None:
    first, second = await started(bellmen), await started(bellmen)
    await first.bell.arm(["default"])
    await second.bell.arm(["default"])
    await first.bell.disarm()
    assert (await first.rings_so_far(), await second.rings_so_far()) == ([], ["default"])
    enqueue(db)
    assert (await first.rings_so_far(), await second.rings_so_far()) == ([], ["default"])
    assert await second.bell.arm(["default"]) is Bell.ARMED
    enqueue(db)
    assert await second.rings_so_far() == ["default", "default"]


def test_the_bells_of_two_queues_are_two_locks(connect: Connect) -> None:
    sleeper, producer = connect(autocommit=True), connect(autocommit=True)
    assert sleeper.execute(sql.ARM, {"queues": ["a", "b"]}).fetchall() == [("a", "armed", None), ("b", "armed", None)]
    assert sleeper.execute(sql.DISARM, {"queues": ["a"]}).fetchall() == [(True, "")]
    assert producer.execute(sql.ARM, {"queues": ["a", "b"]}).fetchall() == [
        ("a", "armed", None),
        ("b", "sleeper", None),
    ]


def test_asking_for_a_bell_in_vain_leaves_no_lock_behind(connect: Connect) -> None:
    sleeper, producer, other = connect(autocommit=True), connect(), connect(autocommit=True)
    enqueue(producer)
    assert sleeper.execute(sql.ARM, {"queues": ["default"]}).fetchall() == [("default", "producers", None)]
    producer.commit()
    assert other.execute(sql.ARM, {"queues": ["default"]}).fetchall() == [("default", "armed", None)]
    assert sleeper.execute(sql.ARM, {"queues": ["default"]}).fetchall() == [("default", "sleeper", None)]
    other.execute("SELECT pg_advisory_unlock_all()")
    assert sleeper.execute(sql.ARM, {"queues": ["default"]}).fetchall() == [("default", "armed", None)]


async def test_a_bell_that_ended_with_its_session_is_missed_by_the_next_probe(
    bellmen: Callable[[], Bellman], db: psycopg.Connection
) -> None:
    second, first = await started(bellmen), await started(bellmen)
    assert await first.bell.arm(["default"]) is Bell.ARMED
    assert await second.bell.arm(["default"]) is Bell.ARMED
    second.rang.clear()
    assert first.bell._connection is not None
    pid = first.bell._connection.pgconn.backend_pid
    # As after kill -9: the session ends, and nobody gives up its bell.
    assert first.bell._task is not None
    first.bell._task.cancel()
    db.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
    enqueue(db)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await second.rang.wait()
    assert second.rings == ["default"]
    enqueue(db)
    assert await second.rings_so_far() == ["default", "default"]
    # It was taken once, and is given up at once.
    await second.bell.disarm()
    third = await started(bellmen)
    assert await third.bell.arm(["default"]) is Bell.ARMED
    assert third.bell._armed == {"default"}


@pytest.mark.parametrize("doubts_first", [True, False])
async def test_a_bell_that_is_asked_for_twice_at_once_is_taken_once(
    bellmen: Callable[[], Bellman], connect: Connect, *, doubts_first: bool
) -> None:
    sleeper, bell = connect(autocommit=True), (await started(bellmen)).bell
    assert sleeper.execute(sql.ARM, {"queues": ["default"]}).fetchall() == [("default", "armed", None)]
    assert await bell.arm(["default"]) is Bell.ARMED
    assert bell._trusted == {"default"}
    sleeper.execute("SELECT pg_advisory_unlock_all()")
    both = (bell._doubt(), bell.arm(["default"]))
    await asyncio.gather(*both if doubts_first else reversed(both))
    assert bell._armed == {"default"}
    # A session that has a lock twice keeps it when it gives it up once.
    await bell.disarm()
    assert sleeper.execute(sql.ARM, {"queues": ["default"]}).fetchall() == [("default", "armed", None)]


async def test_without_a_listener_arming_says_so(bellmen: Callable[[], Bellman]) -> None:
    bellman = bellmen()
    assert await bellman.bell.arm(["default"]) is Bell.DOWN
    assert not bellman.bell.is_up


async def test_a_lost_listener_comes_back_without_its_bells_and_rings_for_what_it_missed(
    bellmen: Callable[[], Bellman], db: psycopg.Connection
) -> None:
    bellman = await started(bellmen)
    await bellman.bell.arm(["default"])
    terminate_listeners(db)
    async with asyncio.timeout(PATIENCE_SECONDS):
        # Once when it is lost, so that the worker looks by itself, and once when it is back.
        while len(bellman.rings) < 2:
            bellman.rang.clear()
            await bellman.rang.wait()
    assert bellman.rings == [None, None]
    assert (bellman.telemetry.counts[Event.LISTENER_LOST], bellman.telemetry.counts[Event.LISTENER_BACK]) == (1, 1)
    assert await bellman.bell.arm(["default"]) is Bell.ARMED
    enqueue(db)
    assert await bellman.rings_so_far() == [None, None, "default"]


async def test_a_session_that_no_longer_listens_is_given_up(
    bellmen: Callable[[], Bellman], db: psycopg.Connection
) -> None:
    bellman = await started(bellmen)
    connection = bellman.bell._connection
    assert connection is not None
    await bellman.bell._ask("UNLISTEN *", {})
    await bellman.bell._probe()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await bellman.rang.wait()
    assert bellman.telemetry.counts[Event.LISTENER_LOST] == 1
    assert await bellman.bell.arm(["default"]) is Bell.ARMED


def terminate_listeners(db: psycopg.Connection) -> int:
    """Terminate every listener of the database; how many there were."""
    return len(
        db.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgoutbox listen'"
        ).fetchall()
    )


# --- workers ----------------------------------------------------------------------------------------------------------


class Receiver:
    """An outbox that notes what it delivers."""

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


async def test_a_worker_finds_what_a_transaction_commits_late(
    dsn: str, connect: Connect, db: psycopg.Connection
) -> None:
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


async def test_a_commit_while_the_listener_was_away_is_found_when_it_is_back(
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
            await heard.wait_for(Event.LISTENER_LOST)
            allow_connections(gate, db.info.dbname, "true")
            await heard.wait_for(Event.LISTENER_BACK)
            await receiver.heard.wait()
    assert state_of(db, message_id) == State.SENT


def allow_connections(gate: psycopg.Connection, database: str, answer: str) -> None:
    """Let nobody, or everybody, connect to the database; who is connected stays."""
    gate.execute(
        psycopg.sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(
            psycopg.sql.Identifier(database), psycopg.sql.SQL("true" if answer == "true" else "false")
        )
    )


async def test_a_ring_that_comes_while_the_worker_looks_in_vain_is_not_forgotten(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spurious ring wakes the worker, whose claim finds nothing; a message commits before that claim has returned."""
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

    def note_ring(self: Worker, queue: str | None) -> None:
        on_ring(self, queue)
        rung.set()

    monkeypatch.setattr(Store, "claim", claim_and_miss)
    monkeypatch.setattr(Worker, "_on_ring", note_ring)
    async with running(worker):
        await worker.asleep.wait()
        worker.asleep.clear()
        gate_is_open = True
        db.execute(sql.RING, {"queues": ["default"]})
        await first_of(receiver.heard, worker.asleep)
        assert receiver.heard.is_set()


async def test_rings_without_an_end_do_not_keep_a_worker_from_its_retries(dsn: str, db: psycopg.Connection) -> None:
    """A ring has it look at fresh messages first, and while one is handled it is rung for the next."""
    outbox = Outbox(settings_for(dsn, concurrency=1))
    retried = asyncio.Event()

    async def be_rung() -> None:
        enqueue(db)
        db.execute(sql.RING, {"queues": ["default"]})
        await until(lambda: worker._ring_is_unanswered)

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


async def test_a_bell_that_is_given_up_while_a_sleeper_asks_for_it_is_not_trusted(
    dsn: str,
    connect: Connect,
    db: psycopg.Connection,
    bellmen: Callable[[], Bellman],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The news that the bell was given up comes with the answer that there is one; an enqueue is open meanwhile."""
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

    gated = f"""
        WITH answer(queue, bell, permit_seconds) AS MATERIALIZED ({sql.ARM})
        SELECT queue, bell, permit_seconds FROM answer WHERE pg_advisory_lock_shared(1) IS NOT NULL
    """
    monkeypatch.setattr(sql, "ARM", gated)
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
    worker = WatchedWorker(receiver.outbox, settings=settings_for(dsn, listen=False, sweep_seconds=0.1))
    async with running(worker):
        await worker.asleep.wait()
        held = db.execute(f"SELECT count(*) FROM {ADVISORY_LOCKS} WHERE l.classid = 1885826146")
        assert held.fetchone() == (0,)
        message_id = enqueue(db)
        await receiver.heard.wait()
    assert receiver.delivered == [message_id]


@pytest.mark.parametrize("order", ["sleeper first", "busy first"])
async def test_a_worker_that_is_busy_leaves_the_bell_to_the_sleepers(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """One ring wakes both. Whoever of them is first, the one that goes back to sleep is woken by the next commit."""
    go_on, disarmed = asyncio.Event(), asyncio.Event()
    disarm = Doorbell.disarm
    busy_outbox = Outbox(settings_for(dsn, concurrency=1))

    @busy_outbox.handler("long")
    async def long(message: Message, ctx: Context) -> None:
        await go_on.wait()

    async def disarm_in_order(self: Doorbell) -> object:
        gives_up = self is busy._bell and bool(self._armed)
        if gives_up and order == "sleeper first":
            await sleeper.asleep.wait()
        answer: object = await disarm(self)  # type: ignore[func-returns-value] # passed on, whatever it is
        if gives_up:
            disarmed.set()
        return answer

    receiver = Receiver(dsn)
    busy, sleeper = WatchedWorker(busy_outbox), WatchedWorker(receiver.outbox)
    async with running(busy):
        await busy.asleep.wait()
        async with running(sleeper):
            await sleeper.asleep.wait()
            sleeper.asleep.clear()
            monkeypatch.setattr(Doorbell, "disarm", disarm_in_order)
            enqueue(db, topic="long")
            await disarmed.wait()
            await sleeper.asleep.wait()
            enqueue(db)
            try:
                await receiver.heard.wait()
            finally:
                go_on.set()


async def test_a_flood_of_rings_for_other_queues_does_not_wake_a_worker(dsn: str, db: psycopg.Connection) -> None:
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
