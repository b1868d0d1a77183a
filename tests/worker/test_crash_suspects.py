"""Tests messages with a lost attempt: any of them may crash its process, so they are not tried again together.

Those that have lost half of their attempts are suspects, and those beside them: a worker has one of them in flight.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Outbox
from pgoutbox.message import Message, Transient
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    begin,
    enqueue,
    lapse,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until
from tests.support.worker_sql import WatchedWorker, claim, run_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from pgoutbox.handlers import Context

pytestmark = pytest.mark.slow


def lost(db: psycopg.Connection, topic: str = "greet", *, times: int = 1, max_attempts: int = 11) -> int:
    """Create a message whose worker died this many times in a row. The next claim does not find it: see `all_due`."""
    message_id = enqueue(db, topic, max_attempts=max_attempts)
    for number in range(times):
        assert [row.id for row in claim(db, topics=[topic], worker=f"dead-{number}")] == [message_id]
        if number < times - 1:
            lapse(db, message_id)
    return message_id


def all_due(db: psycopg.Connection) -> None:
    """Let all leases end in the order of the claims."""
    db.execute("UPDATE pgoutbox.claim SET lease_expires_at = now() - interval '1 h' + (claimed_at - now()) / 1000")


class Gate:
    """An outbox whose topic `greet` waits for the gate and whose topic `bill` does not."""

    def __init__(self, dsn: str, **settings: object) -> None:
        self.outbox = Outbox(settings_for(dsn, **settings))
        self.opened = asyncio.Event()
        self.waiting: list[int] = []
        self.billed: list[int] = []

        @self.outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            self.waiting.append(message.id)
            await self.opened.wait()

        @self.outbox.handler("bill", retry=RetryPolicy.steps(0, jitter=0))
        async def bill(message: Message, ctx: Context) -> None:
            self.billed.append(message.id)
            if message.attempt_count == 1:
                raise Transient("busy")


async def test_a_suspect_in_flight_delays_only_other_suspects(dsn: str, db: psycopg.Connection) -> None:
    first, second = lost(db, max_attempts=2), lost(db, max_attempts=2)
    all_due(db)
    gate = Gate(dsn)
    worker = WatchedWorker(gate.outbox)
    async with running(worker):
        await until(lambda: gate.waiting)
        fresh = enqueue(db, "bill")
        await until(lambda: state_of(db, fresh) == "sent")
        assert gate.waiting == [first]
        assert gate.billed == [fresh, fresh]
        assert row_of(db, second).attempt_count == 1
        # No periodic poll wakes this worker: the end of the first message does.
        gate.opened.set()
        await until(lambda: state_of(db, second) == "sent")


async def test_a_worker_sleeps_while_its_suspect_is_in_flight_and_others_are_due(
    dsn: str, db: psycopg.Connection
) -> None:
    lost(db, max_attempts=2), lost(db, max_attempts=2)
    all_due(db)
    gate = Gate(dsn)
    worker = WatchedWorker(gate.outbox)
    async with running(worker):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.asleep.wait()
        assert len(gate.waiting) == 1
        gate.opened.set()


async def test_each_of_several_workers_has_its_own_suspect(dsn: str, db: psycopg.Connection) -> None:
    suspects = [lost(db, max_attempts=2) for _ in range(3)]
    all_due(db)
    gates = [Gate(dsn), Gate(dsn)]
    async with running(Worker(gates[0].outbox)), running(Worker(gates[1].outbox)):
        await until(lambda: all(gate.waiting for gate in gates))
        assert sorted(gates[0].waiting + gates[1].waiting) == suspects[:2]
        for gate in gates:
            gate.opened.set()
        await until(lambda: state_of(db, suspects[2]) == "sent")


async def test_a_message_that_ends_without_an_attempt_does_not_wait_for_a_suspect(
    dsn: str, db: psycopg.Connection
) -> None:
    first, exhausted = lost(db), lost(db, max_attempts=1)
    all_due(db)
    gate = Gate(dsn)
    async with running(Worker(gate.outbox)):
        await until(lambda: state_of(db, exhausted) == "failed")
        await until(lambda: gate.waiting == [first])
        gate.opened.set()


async def test_a_suspect_longer_than_a_lease_does_not_delay_others(dsn: str, db: psycopg.Connection) -> None:
    lost(db, max_attempts=2)
    other = lost(db, "bill", max_attempts=2)
    all_due(db)
    gate = Gate(dsn, lease_seconds=5)
    async with running(Worker(gate.outbox)):
        await until(lambda: state_of(db, other) == "sent")
        assert gate.waiting
        assert not gate.opened.is_set()
        gate.opened.set()


@pytest.mark.parametrize("how", ["once", "drain"])
async def test_one_run_delivers_many_suspects_with_any_history(dsn: str, db: psycopg.Connection, how: str) -> None:
    ids = [
        *(lost(db) for _ in range(20)),
        *(lost(db, times=2) for _ in range(5)),
        *(lost(db, max_attempts=2) for _ in range(5)),
        *(lost(db) for _ in range(20)),
    ]
    failed = [lost(db, max_attempts=1) for _ in range(5)]
    all_due(db)
    gate = Gate(dsn)
    gate.opened.set()
    worker = Worker(gate.outbox)
    await (worker.run_once() if how == "once" else worker.drain())
    assert {row.state for row in rows_of(db, *ids)} == {"sent"}
    assert {row.state for row in rows_of(db, *failed)} == {"failed"}
    assert sorted(gate.waiting) == ids


class Stations:
    """An outbox whose topic `greet` lets each message end when the test says so."""

    def __init__(self, dsn: str, ids: Sequence[int]) -> None:
        self.outbox = Outbox(settings_for(dsn, concurrency=50))
        self.in_flight: set[int] = set()
        self._told_to_end = {message_id: asyncio.Event() for message_id in ids}

        @self.outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            self.in_flight.add(message.id)
            await self._told_to_end[message.id].wait()
            self.in_flight.remove(message.id)

    def end(self, ids: Sequence[int]) -> None:
        for message_id in ids:
            self._told_to_end[message_id].set()

    async def are(self, worker: WatchedWorker, ids: Sequence[int]) -> None:
        """Wait until the worker sleeps with exactly these in flight."""
        await until(lambda: self.in_flight == set(ids))
        run_of(worker).kernel.sweep()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.falls_asleep()
        assert self.in_flight == set(ids)


def test_messages_of_attempts_that_were_lost_together_fall_due_one_after_the_other(db: psycopg.Connection) -> None:
    ids = [lost(db) for _ in range(3)]
    ended = lost(db, max_attempts=1)
    all_due(db)
    with db.transaction():
        assert [(row.id, row.state) for row in claim(db)] == [(ids[0], "sending"), (ended, "failed")]
        seconds = db.execute(
            "SELECT id, extract(epoch FROM available_at - now())::float8 FROM pgoutbox.message_live WHERE id > %s"
            " ORDER BY id",
            [ids[0]],
        ).fetchall()
    assert seconds == [(ids[1], 0.05), (ids[2], 0.1)]
    assert [outcome for _, outcome, _ in attempts_of(db, ids[2])] == ["lost"]


async def test_messages_with_a_lost_attempt_run_beside_each_other_and_a_suspect_alone(
    dsn: str, db: psycopg.Connection
) -> None:
    first, second = lost(db, max_attempts=2), lost(db, max_attempts=2)
    others = [lost(db) for _ in range(20)]
    all_due(db)
    stations = Stations(dsn, [first, second, *others])
    worker = WatchedWorker(stations.outbox)
    async with running(worker):
        await stations.are(worker, [first, *others])
        stations.end(others)
        await stations.are(worker, [first])
        stations.end([first, second])
        await until(lambda: state_of(db, second) == "sent")


async def test_a_suspect_is_alone_in_all_queues_of_its_worker(dsn: str, db: psycopg.Connection) -> None:
    first, second = lost(db, max_attempts=2), lost(db, max_attempts=2)
    all_due(db)
    db.execute("UPDATE pgoutbox.message_live SET queue = 'other' WHERE id = %s", [second])
    db.execute("UPDATE pgoutbox.claim SET queue = 'other' WHERE %s = ANY (ids)", [second])
    stations = Stations(dsn, [first, second])
    worker = WatchedWorker(stations.outbox, queues=["default", "other"])
    async with running(worker):
        await stations.are(worker, [first])
        stations.end([first])
        await stations.are(worker, [second])
        stations.end([second])
        await until(lambda: state_of(db, second) == "sent")


async def test_the_rules_of_a_queue_apply_to_its_lapsed_attempts(dsn: str, db: psycopg.Connection) -> None:
    """The worker of another queue leaves them alone: its handler of the topic may have other rules."""
    message_id = enqueue(db, queue="careful")
    assert len(claim(db, queue="careful", worker="dead")) == 1
    lapse(db, message_id)
    careful, other = Outbox(settings_for(dsn)), Outbox(settings_for(dsn))
    handed_over: list[int] = []

    @careful.handler("greet", on_unknown="hold")
    @other.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handed_over.append(message.id)

    await Worker(other).run_once()
    await Worker(careful, queues=["careful"]).run_once()
    assert (handed_over, state_of(db, message_id)) == ([], "failed")


@pytest.mark.parametrize("how", ["once", "drain"])
async def test_one_run_tries_lost_messages_one_after_the_other(dsn: str, db: psycopg.Connection, how: str) -> None:
    """More of them than one statement ends."""
    ids = [lost(db) for _ in range(120)]
    all_due(db)
    outbox = Outbox(settings_for(dsn, concurrency=200))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    worker = Worker(outbox)
    await (worker.run_once() if how == "once" else worker.drain())
    assert {row.state for row in rows_of(db, *ids)} == {"sent"}
    together = db.execute("SELECT count(*) FROM pgoutbox.message GROUP BY claimed_at ORDER BY 1 DESC LIMIT 1")
    assert together.fetchall() <= [(len(ids) // 4,)]


async def test_a_suspect_that_still_runs_in_the_process_that_claims_it_is_followed_by_the_next(
    dsn: str, db: psycopg.Connection
) -> None:
    first = enqueue(db, max_attempts=4)
    stations = Stations(dsn, [first, second := first + 1])
    worker = WatchedWorker(stations.outbox)
    async with running(worker):
        await until(lambda: stations.in_flight == {first})
        with db.transaction():
            assert enqueue(db, max_attempts=2) == second
            begin(db, second, worker="dead", lease_seconds=-1)
            # Another worker has begun the second of its four attempts, and died.
            db.execute(
                "UPDATE pgoutbox.claim SET worker = 'dead', lease_expires_at = now() - interval '1 h'"
                " WHERE %s = ANY (ids)",
                [first],
            )
            db.execute("UPDATE pgoutbox.message SET attempt_count = 2, worker = 'dead' WHERE id = %s", [first])
        run_of(worker).kernel.sweep()
        await until(lambda: row_of(db, first).attempt_count == 3)
        stations.end([first, second])
        await until(lambda: [state_of(db, i) for i in (first, second)] == ["sent", "sent"])


async def test_lost_messages_of_a_batch_handler_are_handed_over_once_more(dsn: str, db: psycopg.Connection) -> None:
    ids = [lost(db) for _ in range(10)]
    all_due(db)
    outbox = Outbox(settings_for(dsn, concurrency=10))
    seen: list[int] = []

    @outbox.batch_handler("greet", max_size=10)
    async def greet(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        seen.extend(message.id for message in messages)

    await Worker(outbox).drain()
    assert sorted(seen) == ids
    assert all(attempts_of(db, i) == [(1, "lost", "lease expired, outcome unknown")] for i in ids)
