"""Tests that tasks reach Celery, Taskiq, RQ and Dramatiq after the commit, with the message's idempotency key as id.

The examples `hand_over_celery`, `hand_over_taskiq`, `hand_over_rq` and `hand_over_dramatiq` run with the real libraries
and the workers of their command lines.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
import redis

from pgoutbox import CallNext, Message, Middleware, Outcome, Transient
from pgoutbox.worker import Worker
from tests.support.brokers import HOST, Broker, redis_server
from tests.support.example_shell import ROOT
from tests.support.outbox_actions import attempts_of, enqueue, make_due, row_of, settings_for
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Library:
    """A library: the command of its worker, and how its queue in Redis looks."""

    name: str
    worker: tuple[str, ...]
    ids: Callable[[Any], list[str]]
    unfinished: Callable[[Any], int]
    recognizes_repetitions: bool = False

    @property
    def topic(self) -> str:
        return f"{self.name}.task"


LIBRARIES: Final = [
    Library(
        "celery",
        ("celery", "--app", "examples.hand_over_celery", "worker", "--pool", "solo", "--without-mingle"),
        lambda client: [json.loads(task)["headers"]["id"] for task in client.lrange("celery", 0, -1)],
        lambda client: client.llen("celery") + client.hlen("unacked"),
    ),
    Library(
        "taskiq",
        ("taskiq", "worker", "--workers", "1", "examples.hand_over_taskiq:broker"),
        lambda client: [json.loads(fields[b"data"])["task_id"] for _, fields in client.xrange("taskiq")],
        lambda client: sum(group["pending"] + group["lag"] for group in client.xinfo_groups("taskiq")),
    ),
    Library(
        "rq",
        ("rq.cli", "worker", "--url", "REDIS_URL"),
        lambda client: [task.decode() for task in client.lrange("rq:queue:default", 0, -1)],
        lambda client: client.llen("rq:queue:default") + client.zcard("rq:wip:default"),
        recognizes_repetitions=True,
    ),
    Library(
        "dramatiq",
        ("dramatiq", "--processes", "1", "--threads", "1", "examples.hand_over_dramatiq"),
        lambda client: [json.loads(task)["message_id"] for task in client.hvals("dramatiq:default.msgs")],
        lambda client: client.hlen("dramatiq:default.msgs") + client.hlen("dramatiq:default.DQ.msgs"),
    ),
]


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = request.param
    return found


@pytest.fixture(scope="session")
def shared_broker() -> Iterator[Broker]:
    """One server for all tests, because the examples, which are imported once, connect to it."""
    with redis_server() as broker:
        yield broker


@pytest.fixture
def client(shared_broker: Broker) -> Iterator[redis.Redis]:
    with redis.Redis(HOST, shared_broker.port) as client:
        client.flushall()
        yield client


@pytest.fixture
async def example(
    library: Library, shared_broker: Broker, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ModuleType]:
    """The example. Its tasks write to the test's database."""
    monkeypatch.setenv("PGOUTBOX_DSN", dsn)
    monkeypatch.setenv("REDIS_URL", f"redis://{HOST}:{shared_broker.port}/0")
    example = importlib.import_module(f"examples.hand_over_{library.name}")
    yield example
    if library.name == "taskiq":  # The connections belong to the event loop of the test.
        await example.broker.shutdown()


def task(name: str = "send_invoice") -> dict[str, object]:
    return {"name": name, "kwargs": {"order_id": 7}}


async def run_once(example: ModuleType, dsn: str, *middlewares: Middleware) -> None:
    """Run a worker of pgoutbox until no message is due."""
    worker = Worker(example.outbox, settings=settings_for(dsn))
    worker._setup = replace(worker._setup, middlewares=middlewares)
    await worker.run_once()


async def lose_answers(messages: Sequence[Message], call_next: CallNext) -> Sequence[Outcome]:
    """Let an attempt end as if its worker had died after the hand-over."""
    await call_next()
    return [Transient("the answer is lost") for _ in messages]


@contextmanager
def working(library: Library, log: Path) -> Iterator[Callable[[], str]]:
    """Run a worker of the library, and yield a function that returns its output."""
    command = [os.environ["REDIS_URL"] if word == "REDIS_URL" else word for word in library.worker]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield log.read_text
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def test_a_task_runs_after_the_commit_with_a_stable_id(
    library: Library, example: ModuleType, client: redis.Redis, dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    db.execute("CREATE TABLE invoice (id text PRIMARY KEY, order_id integer NOT NULL)")
    with psycopg.connect(dsn) as connection:
        message_id = example.outbox.on(connection).enqueue(library.topic, task()).id
        await run_once(example, dsn)
        assert library.ids(client) == []
    await run_once(example, dsn, lose_answers)
    assert row_of(db, message_id).state == "pending"
    (key,) = library.ids(client)

    make_due(db, message_id)
    await run_once(example, dsn)
    assert row_of(db, message_id).state == "sent"
    assert library.ids(client) == [key] * (1 if library.recognizes_repetitions else 2)

    with working(library, tmp_path / "worker.log") as output:
        await asyncio.to_thread(
            wait_until, lambda: db.execute("SELECT FROM invoice").rowcount and not library.unfinished(client), output
        )
    assert db.execute("SELECT id, order_id FROM invoice").fetchall() == [(key, 7)]
    assert key.startswith(f"{message_id}-")


async def test_a_task_waits_while_the_broker_is_down(
    library: Library,
    example: ModuleType,
    shared_broker: Broker,
    client: redis.Redis,
    dsn: str,
    db: psycopg.Connection,
) -> None:
    example.main(7)
    ((message_id,),) = db.execute("SELECT id FROM pgoutbox.message").fetchall()
    shared_broker.stop()
    try:
        await run_once(example, dsn)
    finally:
        shared_broker.start()
    assert row_of(db, message_id).state == "pending"
    ((_, outcome, error),) = attempts_of(db, message_id)
    assert outcome == "snoozed"  # It has used up no attempt.
    assert str(shared_broker.port) in str(error)

    make_due(db, message_id)
    await run_once(example, dsn)
    assert row_of(db, message_id).state == "sent"
    assert len(library.ids(client)) == 1


async def test_an_unknown_task_fails_visibly(
    library: Library, example: ModuleType, dsn: str, db: psycopg.Connection
) -> None:
    message_id = enqueue(db, library.topic, task("send_nothing"))
    await run_once(example, dsn)
    row = row_of(db, message_id)
    assert row.state == "failed"
    assert "send_nothing" in str(row.last_error)
