"""At most `concurrency` handlers run, all slots are used, and handlers that hang cost others none."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, PgOutboxError, RetryPolicy, Settings, SyncContext, Worker
from tests.support.outbox_actions import PATIENCE_SECONDS, due_earlier, enqueue, running, settings_for
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, until, wait_until
from tests.support.worker_process import environment_with

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import psycopg

    from tests.promises.conftest import StartWorker
    from tests.support.worker_process import WorkerProcess

SLOTS = 4
IN_FLIGHT = "SELECT FROM pgoutbox.message_live WHERE state = 'sending'"


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


async def test_messages_are_not_claimed_and_released_again_and_again_beside_slow_handlers(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox, batch_size, delivered = Outbox(settings_for(dsn, concurrency=1, batch_size=10)), 10, 0

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        nonlocal delivered
        # Until the messages that were claimed with this one are released.
        await until(lambda: db.execute(IN_FLIGHT).rowcount == 1)
        delivered += 1

    with db.transaction():
        for _ in range(40):
            enqueue(db)
    async with running(Worker(outbox)):
        await until(lambda: delivered >= 10)
    ((claim_count,),) = db.execute("SELECT sum(attempt_count) FROM pgoutbox.message").fetchall()
    # One claim has a surplus, which is released. At the end, messages wait.
    assert claim_count <= delivered + 1 + 2 * batch_size


@pytest.mark.slow
async def test_a_rare_topic_of_large_batches_claims_few_messages_of_others(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1))
    begun: list[str] = []

    @outbox.handler("slow")
    async def slow(message: Message, ctx: Context) -> None:
        await until(lambda: db.execute(IN_FLIGHT).rowcount == 1)
        begun.append("slow")

    @outbox.batch_handler("rare", max_size=100)
    async def rare(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        begun.extend("rare" for _ in messages)

    topics = ["slow", "rare", "slow", "rare", "slow", "rare", *["slow"] * 37]
    with db.transaction():
        for topic in topics:
            enqueue(db, topic)
    async with running(Worker(outbox)):
        await until(lambda: len(begun) >= 10)
    assert begun.count("rare") == 3
    ((claim_count,),) = db.execute("SELECT sum(attempt_count) FROM pgoutbox.message").fetchall()
    # The first claim takes all messages. After each rare one, a slot that is free claims three, not a hundred.
    surplus = 10
    assert claim_count <= len(topics) + len(begun) + 3 * 3 + surplus


@pytest.mark.slow
async def test_a_slow_batch_handler_gets_large_batches(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1))
    sizes: list[int] = []

    @outbox.batch_handler("greet", max_size=10)
    async def greet(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        # Until the messages that were claimed with these are released.
        await until(lambda: db.execute(IN_FLIGHT).rowcount == len(messages))
        sizes.append(len(messages))

    with db.transaction():
        for _ in range(81):
            enqueue(db)
    async with running(Worker(outbox)):
        await until(lambda: sum(sizes) == 81)
    # The end of a page of ordering keys can take the place of a message.
    assert len(sizes) <= 10


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


# `hangs` sleeps in a thread, `deaf` ignores its cancellation, and `waits` until the test says so.
APPLICATION = """
    import asyncio
    import logging
    import os
    import time

    from pgoutbox import Outbox, RetryPolicy, Topic

    outbox = Outbox()
    once = RetryPolicy.steps(3600)


    @outbox.handler(Topic("hangs", version=2, upgrade={1: lambda payload: payload}), timeout=1, retry=once)
    def hangs(message, ctx):
        logging.warning("handler begun")
        while not os.path.exists(os.environ["RETURN"]):
            time.sleep(0.05)


    @outbox.handler("deaf", timeout=1, retry=once)
    async def deaf(message, ctx):
        logging.warning("handler begun")
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass


    @outbox.handler("waits")
    async def waits(message, ctx):
        while not os.path.exists(os.environ["GO_ON"]):
            await asyncio.sleep(0.05)


    @outbox.handler("works")
    async def works(message, ctx):
        pass
"""

# A worker of the queue `shop` delivers one topic: messages of the others are in a queue of other workers, or follow.
ONE_TOPIC = """
    import time

    from pgoutbox import Outbox, RetryPolicy, Topic

    outbox = Outbox()


    @outbox.handler(Topic("order", queue="shop"), timeout=1, retry=RetryPolicy.steps(3600))
    def deliver(message, ctx):
        while message.payload.get("hangs"):
            time.sleep(0.05)
"""
OTHERS = {
    "another queue": """

    @outbox.handler(Topic("bill", queue="office"))
    async def bill(message, ctx):
        pass
""",
    "a hook": """

    @outbox.on_failed("order")
    async def tell(message, ctx):
        pass
""",
}

SERVERS = {
    "uvicorn": """
import uvicorn
from starlette.applications import Starlette
from pgoutbox import lifespan

uvicorn.run(Starlette(lifespan=lifespan(outbox)), port=0)
""",
    "asyncio": """
from pgoutbox import lifespan


async def serve():
    async with lifespan(outbox)(None):
        await asyncio.Event().wait()


asyncio.run(serve())
""",
}


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a worker: files whose existence ends the handlers of `hangs` and `waits`."""
    return {"RETURN": str(tmp_path / "return"), "GO_ON": str(tmp_path / "go-on")}


def states(db: psycopg.Connection, *ids: int) -> set[str]:
    rows = db.execute("SELECT DISTINCT state FROM pgoutbox.message_view WHERE id = ANY (%s)", [list(ids)]).fetchall()
    return {state for (state,) in rows}


def deliver(db: psycopg.Connection, worker: WorkerProcess) -> None:
    """Enqueue healthy messages, and wait for their delivery."""
    ids = [enqueue(db, "works") for _ in range(5)]
    wait_until(lambda: states(db, *ids) == {"sent"}, lambda: worker.log)


def probe(worker: WorkerProcess, path: str) -> tuple[int, str]:
    """Return the answer of the worker to a probe."""
    wait_until(lambda: worker.records("metrics_served"), lambda: worker.log)
    (record,) = worker.records("metrics_served")
    try:
        with urllib.request.urlopen(f"http://{record['address']}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("topic", ["hangs", "deaf"])
def test_a_worker_that_has_lost_half_of_its_slots_says_so_and_ends_with_1(
    db: psycopg.Connection, start_worker: StartWorker, variables: dict[str, str], tmp_path: Path, topic: str
) -> None:
    with db.transaction():
        hanging = [enqueue(db, topic) for _ in range(2)]
        waiting = enqueue(db, "waits")
    settings = {"concurrency": "4", "lease_seconds": "1", "metrics_address": "127.0.0.1:0"}
    worker = start_worker(APPLICATION, environment=variables, **settings, shutdown_grace_seconds="600")
    deliver(db, worker)
    wait_until(
        lambda: probe(worker, "/livez")[0] == 503, lambda: f"{probe(worker, '/livez')} with {worker.events('ERROR')}"
    )
    answers = [probe(worker, path) for path in ("/livez", "/readyz")]
    assert [(status, f"topics: {topic}" in text) for status, text in answers] == [(503, True)] * 2
    second = start_worker(APPLICATION, environment=variables, **settings)
    deliver(db, second)
    assert states(db, waiting) == {"sending"}
    (tmp_path / "go-on").touch()
    assert worker.wait() == 1
    assert states(db, waiting) == {"sent"}
    assert states(db, *hanging) == {"pending"}
    assert any(topic in str(record["reason"]) for record in worker.records("worker_failed"))


def test_a_worker_begins_no_messages_of_a_topic_that_holds_a_quarter_of_its_slots(
    db: psycopg.Connection, start_worker: StartWorker, variables: dict[str, str], tmp_path: Path
) -> None:
    with db.transaction():
        for _ in range(2):
            enqueue(db, "hangs")
    worker = start_worker(APPLICATION, environment=variables, concurrency="8", lease_seconds="1")
    wait_until(lambda: len(worker.records("attempt_abandoned")) == 2, lambda: worker.log)
    deliver(db, worker)
    with db.transaction():
        later = [enqueue(db, "hangs", payload_version=version) for version in (1, 2, 1, 2)]
    deliver(db, worker)
    assert states(db, *later) == {"pending"}
    attempts = db.execute("SELECT sum(attempt_count) FROM pgoutbox.message_view WHERE id = ANY (%s)", [later])
    assert attempts.fetchone() == (0,)
    assert [record["topic"] for record in worker.records("topic_suspended")] == ["hangs"]
    (tmp_path / "return").touch()
    wait_until(lambda: states(db, *later) == {"sent"}, lambda: worker.log)
    assert worker.stop() == 0


@pytest.mark.parametrize("other", OTHERS)
def test_a_worker_that_delivers_one_topic_goes_on_with_its_healthy_messages(
    db: psycopg.Connection, start_worker: StartWorker, other: str
) -> None:
    """If the topic were suspended, the worker would idle for ever, and its probes would say that it is well."""
    with db.transaction():
        for _ in range(2):
            enqueue(db, "order", {"hangs": True}, queue="shop")
    worker = start_worker(ONE_TOPIC + OTHERS[other], "--queue", "shop", concurrency="8", lease_seconds="1")
    wait_until(lambda: len(worker.records("attempt_abandoned")) == 2, lambda: worker.log)
    healthy = [enqueue(db, "order", {}, queue="shop") for _ in range(5)]
    wait_until(lambda: states(db, *healthy) == {"sent"}, lambda: worker.log)
    assert worker.records("topic_suspended") == []
    assert worker.stop() == 0


@pytest.mark.parametrize("topic", ["hangs", "deaf"])
def test_a_worker_that_is_told_to_stop_ends_with_0_although_its_handlers_hang(
    db: psycopg.Connection, start_worker: StartWorker, variables: dict[str, str], topic: str
) -> None:
    enqueue(db, topic)
    worker = start_worker(APPLICATION, environment=variables, concurrency="2")
    wait_until(lambda: "handler begun" in worker.log, lambda: worker.log)
    assert worker.stop() == 0
    assert "attempt_abandoned" in worker.events()


@pytest.mark.parametrize("how", ["--once", "--drain"])
def test_a_run_that_has_lost_half_of_its_slots_names_the_topic_and_ends_with_1(
    db: psycopg.Connection, start_worker: StartWorker, variables: dict[str, str], how: str
) -> None:
    enqueue(db, "hangs")
    worker = start_worker(APPLICATION, how, environment=variables, concurrency="2", lease_seconds="1")
    assert worker.wait() == 1
    assert any("hangs" in str(record["reason"]) for record in worker.records("worker_failed"))


async def test_a_worker_with_one_topic_ends_too_and_its_error_names_the_topic(db: psycopg.Connection, dsn: str) -> None:
    """It is not suspended: the worker would have nothing to do, and would never end."""
    outbox = Outbox(Settings(dsn=dsn, concurrency=4, lease_seconds=1))
    let_go = threading.Event()

    @outbox.handler("hangs", timeout=1, retry=RetryPolicy.steps(3600))
    def hangs(message: Message, ctx: SyncContext) -> None:
        let_go.wait(PROCESS_PATIENCE_SECONDS)

    worker = Worker(outbox)
    enqueue(db, "hangs")
    run = asyncio.create_task(worker.run())
    try:
        await until(lambda: worker.status().abandoned == 1)
        enqueue(db, "hangs")
        with pytest.raises(PgOutboxError, match=r"half of the slots .* topics: hangs"):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await run
    finally:
        let_go.set()


# uvicorn handles SIGTERM, and a plain event loop does not.
@pytest.mark.parametrize("loop", ["uvicorn", "asyncio"])
def test_a_web_server_ends_with_its_worker_although_a_handler_hangs(
    db: psycopg.Connection, dsn: str, variables: dict[str, str], tmp_path: Path, loop: str
) -> None:
    (tmp_path / "shop.py").write_text(textwrap.dedent(APPLICATION) + SERVERS[loop])
    enqueue(db, "hangs")
    done = subprocess.run(
        [sys.executable, tmp_path / "shop.py"],
        env=environment_with(dsn=dsn, concurrency="2", lease_seconds="1") | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_PATIENCE_SECONDS,
    )
    assert done.returncode != 0
    assert "topics: hangs" in done.stderr
