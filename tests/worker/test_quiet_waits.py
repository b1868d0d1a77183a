"""Tests that no message waits unseen although a worker has a free slot: scenes in which two things meet."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

from pgoutbox import Context, Message, Outbox, PgOutboxError, RetryPolicy, Transient, Worker
from pgoutbox.kernel import statements
from pgoutbox.operations import Operator
from pgoutbox.worker.kernel_run import Link
from tests.support.outbox_actions import enqueue, rows_of, running, settings_for, state_of
from tests.support.proxy import proxy_to
from tests.support.waiting import until, until_idle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pgoutbox.kernel.seams import Row, Step
    from tests.conftest import Connect

pytestmark = pytest.mark.slow

LONG: Final[dict[str, Any]] = {"lease_seconds": 600, "poll_interval_seconds": 3600}


async def test_a_listener_whose_new_connection_hangs_stops_no_claim(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    with proxy_to(dsn, tmp_path) as proxy:
        listener = {"heartbeat_seconds": 0.5, "heartbeat_timeout_seconds": 0.2}
        settings = settings_for(
            dsn,
            listen_dsn=proxy.dsn,
            connect_timeout_seconds=300,
            **{f"listener_{name}": value for name, value in listener.items()},
            **LONG,
        )
        outbox = Outbox(settings)

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None: ...

        async with running(worker := Worker(outbox)):
            await until_idle(worker)
            with proxy.stalled():
                await until(lambda: worker.status().is_listener_up is False)
                for _ in range(3):
                    enqueue(db)
                    await until(lambda: {row.state for row in rows_of(db)} == {"sent"})


async def test_messages_whose_content_cannot_be_read_are_released(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, **LONG))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    outbox.on(db).enqueue_fanout("greet", 3, ["a:1", "a:2"], content={"text": "shared"}, require_transaction=False)
    db.execute("ALTER TABLE pgoutbox.content RENAME TO mislaid")
    with pytest.raises((psycopg.Error, PgOutboxError)):
        await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db)] == ["pending", "pending"]


async def test_a_worker_that_stops_beside_a_deaf_handler_tells_others_of_its_retries(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox, others = (
        Outbox(settings_for(dsn, **LONG | {"shutdown_grace_seconds": 1})),
        Outbox(settings_for(dsn, **LONG)),
    )
    begun: list[str] = []
    may_fail, may_end = asyncio.Event(), asyncio.Event()

    @outbox.handler("deaf")
    async def deaf(message: Message, ctx: Context) -> None:
        begun.append(message.topic)
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()

    @outbox.handler("flaky")
    async def flaky(message: Message, ctx: Context) -> None:
        begun.append(message.topic)
        await may_fail.wait()
        raise Transient("busy", retry_after=1)

    @others.handler("flaky", retry=RetryPolicy.steps(3600))
    async def good(message: Message, ctx: Context) -> None: ...

    stopping = Worker(outbox)
    run = asyncio.create_task(stopping.run())
    enqueue(db, "deaf")
    message_id = enqueue(db, "flaky")
    await until(lambda: len(begun) == 2)
    async with running(idle := Worker(others)):
        await until_idle(idle)
        stopping.stop()
        # It has left the watch, so only its last words tell of what it writes from now on.
        await until(lambda: stopping.status().is_listener_up is False)
        may_fail.set()
        await run
        await until(lambda: state_of(db, message_id) == "sent")
    may_end.set()


async def test_a_message_that_falls_due_while_a_finish_is_on_its_way_is_not_overslept(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(settings_for(dsn, **LONG))
    trip = Link.trip
    begun, has_asked, may_end, is_late = (asyncio.Event() for _ in range(4))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if message.payload == "first":
            begun.set()
            await may_end.wait()

    async def send_late(self: Link, steps: Sequence[Step]) -> list[list[Row]]:
        if not is_late.is_set() and any(statement is statements.FINISH_SENT for statement, _ in steps):
            is_late.set()
            db.execute("SELECT pg_sleep(3)")  # Simulates a slow network.
        answer = await trip(self, steps)
        if begun.is_set() and any(statement is statements.NEXT_DUE for statement, _ in steps):
            has_asked.set()
        return answer

    monkeypatch.setattr(Link, "trip", send_late)
    async with running(worker := Worker(outbox)):
        await until_idle(worker)
        second = enqueue(db, notify=False)
        db.execute("UPDATE pgoutbox.message_live SET available_at = clock_timestamp() + interval '1.5 s'")
        enqueue(db, payload="first")
        await has_asked.wait()
        may_end.set()
        await is_late.wait()
        await until(lambda: state_of(db, second) == "sent")


async def test_a_run_delivers_all_of_a_limited_queue_beside_ordering_keys(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    """The end of a page of ordering keys takes a permit of the claim from the messages behind it."""
    outbox = Outbox(settings_for(dsn, **LONG))
    delivered: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        delivered.append(message.id)

    Operator(connect(autocommit=True)).limit_in_flight("default", 1)
    enqueue(db, ordering_key="k")
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 h'")
    ids = [enqueue(db) for _ in range(30)]
    await Worker(outbox).run_once()
    assert sorted(delivered) == ids


async def test_a_worker_that_stops_during_an_outage_does_not_connect_without_a_pause(
    dsn: str, db: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_once = psycopg.AsyncConnection.connect
    attempts: list[None] = []

    async def connect(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
        attempts.append(None)
        return await connect_once(*arguments, **options)

    with proxy_to(dsn, tmp_path) as proxy:
        outbox = Outbox(settings_for(proxy.dsn, **LONG | {"shutdown_grace_seconds": 2}))
        begun, may_end = asyncio.Event(), asyncio.Event()

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            begun.set()
            await may_end.wait()

        enqueue(db)
        worker = Worker(outbox)
        run = asyncio.create_task(worker.run())
        await begun.wait()
    monkeypatch.setattr(psycopg.AsyncConnection, "connect", connect)
    worker.stop()
    may_end.set()  # Its end cannot be written.
    await asyncio.wait([run])
    assert len(attempts) < 500  # Without a pause there are more than 10,000.
