"""Tests that an attempt lasts as long as the threads that its handler starts, on any event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Message, Outbox, RetryPolicy, Transient
from pgoutbox.handlers import Context
from pgoutbox.message import State
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker import Worker
from tests.support.outbox_actions import PATIENCE_SECONDS, enqueue, row_of, running, settings_for, state_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

pytestmark = pytest.mark.slow

AT_ONCE = RetryPolicy.steps(0, jitter=0)
TIMEOUT_SECONDS = 0.2


class Post:
    """The receiver. The first hand-over, in a thread, lasts until the test allows it to end."""

    def __init__(self) -> None:
        self.began: list[object] = []
        self.received: list[object] = []
        self.may_end = threading.Event()
        self.was_given_up = False
        self.left: list[asyncio.Future[None]] = []

    def hand_over(self, message: Message) -> None:
        self.began.append(message.payload)
        if message.payload == "old":
            assert self.may_end.wait(PATIENCE_SECONDS)
        self.received.append(message.payload)


@pytest.fixture
def post() -> Post:
    return Post()


async def to_thread(post: Post, message: Message) -> None:
    await asyncio.to_thread(post.hand_over, message)


async def run_in_executor(post: Post, message: Message) -> None:
    await asyncio.get_running_loop().run_in_executor(None, post.hand_over, message)


async def in_a_child_task(post: Post, message: Message) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(post.hand_over, message))


async def after_another_thread(post: Post, message: Message) -> None:
    await asyncio.to_thread(threading.get_ident)
    await asyncio.gather(asyncio.to_thread(threading.get_ident), asyncio.to_thread(post.hand_over, message))


async def given_up(post: Post, message: Message) -> None:
    try:
        await asyncio.wait_for(asyncio.to_thread(post.hand_over, message), TIMEOUT_SECONDS)
    except TimeoutError:
        post.was_given_up = True
        raise Transient("no answer") from None


@pytest.mark.parametrize("key", ["coalesce_key", "ordering_key"])
@pytest.mark.parametrize("way", [to_thread, run_in_executor, in_a_child_task, after_another_thread, given_up])
async def test_a_newer_message_waits_for_the_threads_of_an_async_handler(
    dsn: str, db: psycopg.Connection, post: Post, way: Callable[[Post, Message], object], key: str
) -> None:
    outbox = Outbox(settings_for(dsn))
    timeout = None if way is given_up else TIMEOUT_SECONDS

    @outbox.handler("greet", timeout=timeout, retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> None:
        await way(post, message)  # type: ignore[misc] # all of them are coroutine functions

    old = enqueue(db, payload="old", **{key: "k"})  # type: ignore[arg-type] # one of the two names
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: post.began)
        new = enqueue(db, payload="new", **{key: "k"})  # type: ignore[arg-type] # one of the two names
        counts = worker.telemetry.counts
        await until(lambda: post.was_given_up or counts[LogEvent.ATTEMPT_OVERDUE] or len(post.began) > 1)
        await Worker(outbox).run_once()
        assert post.began == ["old"]
        post.may_end.set()
        await until(lambda: state_of(db, new) == State.SENT)
    # The attempt that gave its thread up is repeated, and by then superseded if it has a coalesce key.
    again = ["old"] if way is given_up and key == "ordering_key" else []
    assert post.received == ["old", *again, "new"]
    assert state_of(db, old) == (State.SKIPPED if way is given_up and not again else State.SENT)


async def test_work_that_waits_for_a_thread_until_its_timeout_never_begins(
    dsn: str, db: psycopg.Connection, post: Post
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", timeout=TIMEOUT_SECONDS, retry=RetryPolicy.steps(3600, jitter=0))
    async def greet(message: Message, ctx: Context) -> None:
        await asyncio.to_thread(post.hand_over, message)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # The application's own one has one thread.
    old = enqueue(db, payload="old")
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: post.began)
        new = enqueue(db, payload="new")
        await until(lambda: worker.telemetry.counts[LogEvent.ATTEMPT_OVERDUE] == 2)
        post.may_end.set()
        await until(lambda: (state_of(db, old), state_of(db, new)) == (State.SENT, State.PENDING))
    assert post.received == ["old"]
    assert row_of(db, new).last_error == "TimeoutError: no thread was free before the timeout of the attempt"


async def test_a_task_that_a_handler_left_running_may_begin_work_in_a_thread_beside_the_next_attempt(
    dsn: str, db: psycopg.Connection, post: Post
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1))
    may_submit = asyncio.Event()
    tasks: list[asyncio.Task[int]] = []

    async def later() -> int:
        await may_submit.wait()
        return await asyncio.to_thread(threading.get_ident)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if not tasks:
            tasks.append(asyncio.create_task(later()))
        else:
            threading.Timer(0, post.may_end.set).start()
            await tasks[0]

    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(post.may_end.wait, PATIENCE_SECONDS)
    first = enqueue(db)
    async with running(Worker(outbox)):
        await until(lambda: state_of(db, first) == State.SENT)
        may_submit.set()
        second = enqueue(db)
        await until(lambda: state_of(db, second) == State.SENT)
    assert tasks[0].exception() is None


async def test_as_many_handlers_as_run_at_once_have_a_thread_of_the_default_executor(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=60))
    all_began = threading.Barrier(60)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        await asyncio.to_thread(all_began.wait, PATIENCE_SECONDS)

    ids = [enqueue(db) for _ in range(60)]
    await Worker(outbox).run_once()
    assert {state_of(db, message_id) for message_id in ids} == {State.SENT}


async def left(post: Post, message: Message) -> None:
    post.left.append(asyncio.get_running_loop().run_in_executor(None, post.hand_over, message))


@pytest.mark.parametrize(("way", "state"), [(to_thread, "sending"), (given_up, "sending"), (left, "sent")])
async def test_a_stop_leaves_a_message_to_its_lease_while_a_thread_of_its_async_handler_runs(
    dsn: str, db: psycopg.Connection, post: Post, way: Callable[[Post, Message], object], state: str
) -> None:
    outbox = Outbox(settings_for(dsn, shutdown_grace_seconds=0))

    @outbox.handler("greet", retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> None:
        await way(post, message)  # type: ignore[misc] # all of them are coroutine functions

    message_id = enqueue(db, payload="old")
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: post.began and (post.was_given_up or way is not given_up))
    try:
        assert (state_of(db, message_id), worker.has_running_handlers) == (state, True)
    finally:
        post.may_end.set()
        await asyncio.gather(*post.left)


async def test_the_outcome_of_a_handler_counts_if_a_thread_that_it_left_hangs(
    dsn: str, db: psycopg.Connection, post: Post
) -> None:
    outbox = Outbox(settings_for(dsn, lease_seconds=1))

    @outbox.handler("greet", timeout=TIMEOUT_SECONDS)
    async def greet(message: Message, ctx: Context) -> None:
        await left(post, message)

    message_id = enqueue(db, payload="old")
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: state_of(db, message_id) == State.SENT)
        assert worker.telemetry.counts[LogEvent.ATTEMPT_ABANDONED] == 1
        post.may_end.set()
        await asyncio.gather(*post.left)


async def test_a_look_up_of_a_name_does_not_prolong_an_attempt(dsn: str, db: psycopg.Connection, post: Post) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", timeout=TIMEOUT_SECONDS, retry=RetryPolicy.steps(3600))
    async def greet(message: Message, ctx: Context) -> None:
        await asyncio.get_running_loop().getaddrinfo("localhost", 80)

    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    blocker = loop.run_in_executor(None, post.may_end.wait, PATIENCE_SECONDS)
    message_id = enqueue(db)
    worker = Worker(outbox)
    await worker.run_once()
    assert state_of(db, message_id) == State.PENDING
    assert worker.telemetry.counts[LogEvent.ATTEMPT_OVERDUE] == 0
    post.may_end.set()
    assert await blocker


# --- the event loop of an application ---------------------------------------------------------------------------------


def uvloop_loop() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return loop


@pytest.mark.parametrize("has_its_own", [True, False], ids=["own executor", "no executor yet"])
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop_loop], ids=["asyncio", "uvloop"])
def test_an_application_keeps_its_default_executor_beside_a_worker(
    dsn: str,
    db: psycopg.Connection,
    post: Post,
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    has_its_own: bool,
) -> None:
    own = ThreadPoolExecutor(3, thread_name_prefix="application")
    names: list[str] = []

    def name_of_thread() -> str:
        return threading.current_thread().name.partition("_")[0]

    async def serve() -> None:
        if has_its_own:
            asyncio.get_running_loop().set_default_executor(own)
        outbox = Outbox(settings_for(dsn))

        @outbox.handler("greet", timeout=TIMEOUT_SECONDS)
        async def greet(message: Message, ctx: Context) -> None:
            names.append(await asyncio.to_thread(name_of_thread))
            await asyncio.to_thread(post.hand_over, message)

        for _ in range(2):  # An application may start another worker.
            await deliver(Worker(outbox))

    async def deliver(worker: Worker) -> None:
        post.may_end.clear()
        message_id = enqueue(db, payload="old")
        async with running(worker):
            await until(lambda: worker.telemetry.counts[LogEvent.ATTEMPT_OVERDUE])
            names.append(await asyncio.to_thread(name_of_thread))
            post.may_end.set()
            await until(lambda: state_of(db, message_id) == State.SENT)
        names.append(await asyncio.to_thread(name_of_thread))

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(serve())
    # The loop of uvloop does not show the executor that it has.
    is_kept = has_its_own and make_loop is asyncio.new_event_loop
    assert names == ["application" if is_kept else "pgoutbox-handler"] * 6
    if is_kept:
        with pytest.raises(RuntimeError, match="after shutdown"):
            own.submit(name_of_thread)
    own.shutdown()
