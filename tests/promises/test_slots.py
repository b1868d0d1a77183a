"""At most `concurrency` handlers run, all slots are used, and messages begin in the order of their due times."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, SyncContext, Worker
from tests.support.outbox_actions import PATIENCE_SECONDS, due_earlier, enqueue, running, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

SLOTS = 4


class Counted:
    """Handlers of `async`, `sync` and `batch` that count those which run."""

    def __init__(self, outbox: Outbox) -> None:
        self.counts: list[int] = []
        self._running: list[int] = []
        self._lock = threading.Lock()
        self._is_full, self._is_full_of_threads = asyncio.Event(), threading.Event()

        @outbox.handler("async")
        async def one(message: Message, ctx: Context) -> None:
            if self._begin():
                self._is_full.set()
            await self._is_full.wait()
            await self._end()

        @outbox.handler("sync")
        def one_in_a_thread(message: Message, ctx: SyncContext) -> None:
            if self._begin():
                self._is_full_of_threads.set()
            self._is_full_of_threads.wait(PATIENCE_SECONDS)
            time.sleep(0.01)  # One more handler would begin.
            self._running.pop()

        @outbox.batch_handler("batch", max_size=2)
        async def two(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
            self._begin()
            await self._end()

    def _begin(self) -> bool:
        with self._lock:
            self._running.append(1)
            self.counts.append(len(self._running))
            return len(self._running) == SLOTS

    async def _end(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)  # One more handler would begin.
        self._running.pop()


@pytest.mark.parametrize("topic", ["async", "sync", "batch"])
async def test_at_most_so_many_handlers_run_and_all_slots_are_used(
    dsn: str, db: psycopg.Connection, topic: str
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=SLOTS, batch_size=50))
    counted = Counted(outbox)
    with db.transaction():
        for _ in range(40):
            enqueue(db, topic)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await Worker(outbox).run_once()
    assert max(counted.counts) == SLOTS


@pytest.mark.slow
async def test_messages_are_not_claimed_and_released_again_and_again_beside_slow_handlers(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox, batch_size, delivered = Outbox(settings_for(dsn, concurrency=1, batch_size=10)), 10, 0
    in_flight = "SELECT FROM pgoutbox.message_live WHERE state = 'sending'"

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        nonlocal delivered
        # Until the messages that were claimed with this one are released.
        await until(lambda: db.execute(in_flight).rowcount == 1)
        delivered += 1

    with db.transaction():
        for _ in range(40):
            enqueue(db)
    async with running(Worker(outbox)):
        await until(lambda: delivered >= 10)
    ((claim_count,),) = db.execute("SELECT sum(attempt_count) FROM pgoutbox.message").fetchall()
    # One claim has a surplus, which is released. At the end, messages wait.
    assert claim_count <= delivered + 1 + 2 * batch_size


async def test_a_new_worker_with_slow_handlers_leaves_all_other_messages_to_others(
    dsn: str, db: psycopg.Connection
) -> None:
    outboxes = [Outbox(settings_for(dsn, concurrency=1, batch_size=10)) for _ in range(2)]
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @outboxes[0].handler("greet")
    async def wait(message: Message, ctx: Context) -> None:
        has_begun.set()
        await may_end.wait()

    @outboxes[1].handler("greet")
    async def end(message: Message, ctx: Context) -> None:
        pass

    with db.transaction():
        for _ in range(10):
            enqueue(db)
    async with running(Worker(outboxes[0])):
        await has_begun.wait()
        async with running(Worker(outboxes[1])):
            await until(lambda: db.execute("SELECT FROM pgoutbox.message WHERE state = 'sent'").rowcount == 9)
        may_end.set()
        await until(lambda: db.execute("SELECT FROM pgoutbox.message WHERE state = 'sent'").rowcount == 10)
    # None was claimed and released.
    assert db.execute("SELECT sum(attempt_count) FROM pgoutbox.message").fetchone() == (10,)


@pytest.mark.slow
async def test_a_slow_batch_handler_gets_large_batches(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1))
    sizes: list[int] = []

    @outbox.batch_handler("greet", max_size=10)
    async def greet(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        await asyncio.sleep(0.6)  # A slow API.
        sizes.append(len(messages))

    with db.transaction():
        for _ in range(41):
            enqueue(db)
    async with running(Worker(outbox)):
        await until(lambda: sum(sizes) == 41)
    # The first one is small, and the end of a page of ordering keys can take the place of a message.
    assert len(sizes) <= 1 + 2 * 4


async def test_messages_begin_in_the_order_of_their_due_times(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1, batch_size=5))
    begun: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        begun.append(message.id)

    # A claim writes the messages in the order of their keys.
    minutes_of = random.Random(1).sample(range(1, 1000), 30)
    due_since = {enqueue(db, coalesce_key=str(minutes)): minutes for minutes in minutes_of}
    for message_id, minutes in due_since.items():
        due_earlier(db, message_id, 60 * minutes)
    await Worker(outbox).run_once()
    assert begun == sorted(due_since, key=lambda message_id: -due_since[message_id])


async def test_messages_of_one_claim_begin_in_the_order_of_their_queues(dsn: str, db: psycopg.Connection) -> None:
    queues = ["q5", "q2", "q4", "q1", "q3", "q6"]
    outbox = Outbox(settings_for(dsn, concurrency=1, batch_size=50))
    begun: list[str] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        begun.append(message.queue)

    with db.transaction():
        for queue in sorted(queues):
            enqueue(db, queue=queue)
    await Worker(outbox, queues=queues).run_once()
    assert begun == queues
