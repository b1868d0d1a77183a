"""Tests the way from a message and its handler to an outcome, without a database."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import pytest
from pydantic import BaseModel

from pgoutbox import Email
from pgoutbox.clock import elapsed_clock
from pgoutbox.database.store import Store
from pgoutbox.errors import ConfigurationError
from pgoutbox.handlers import Context, Handler, SyncContext
from pgoutbox.message import (
    Message,
    Outcome,
    Sent,
    Skip,
    Transient,
)
from pgoutbox.retry import MAX_DELAY_SECONDS, bounded_delay
from pgoutbox.text import MAX_TEXT_LENGTH, clean_text, describe
from pgoutbox.worker.attempt import Attempt, Claim
from pgoutbox.worker.dispatcher import Dispatcher
from pgoutbox.worker.mailing_lists import MailingLists
from pgoutbox.worker.threads import AttemptThreads, ThreadOwner, thread_owner
from tests.support.settings import settings_with
from tests.support.waiting import PROCESS_PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgoutbox.handlers import OnUnknown

P = ParamSpec("P")
R = TypeVar("R")


class Greeting(BaseModel):
    """The payload model of these tests."""

    name: str
    age: int = 0


def handler_of(
    function: Callable[..., object],
    *,
    model: type[BaseModel] | None = None,
    permanent: tuple[type[BaseException], ...] = (),
    timeout: float | None = None,
    on_unknown: OnUnknown = "retry",
    max_size: int | None = None,
) -> Handler:
    return Handler(
        "greet",
        function,
        timeout_seconds=timeout,
        on_unknown=on_unknown,
        is_batch=max_size is not None,
        max_size=max_size,
        permanent=permanent,
        payload=model,
    )


def message_of(payload: object = None, *, destination: str | None = None, message_id: int = 1) -> Message[object]:
    now = datetime(2024, 1, 1, tzinfo=UTC)
    return Message(message_id, "greet", "default", destination, payload, {}, 1, 11, now, now, None)


async def hold(attempt: Attempt) -> None:
    """Every lease is valid."""


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    """Return a dispatcher without transports, with one thread."""
    with AttemptThreads(1) as threads:
        settings = settings_with(dsn="host=/nowhere")
        lists = MailingLists(settings, Store(settings, worker="w").attempts.fetch)
        yield Dispatcher({}, threads, lists=lists)


async def outcome_of(dispatcher: Dispatcher, handler: Handler, message: Message[object]) -> Outcome:
    (outcome,) = await dispatcher.run(
        [Attempt(message, handler, Claim(datetime(2024, 1, 1, tzinfo=UTC)), elapsed_clock(), hold)]
    )
    return outcome


# --- registration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5001])
def test_a_batch_size_out_of_bounds_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"max_size={size}: must be 1 to 5000"):
        handler_of(lambda message, ctx: None, max_size=size)


# --- payloads ---------------------------------------------------------------------------------------------------------


async def test_a_handler_gets_its_payload_as_the_model(dispatcher: Dispatcher) -> None:
    seen: list[object] = []

    async def greet(message: Message[Greeting], ctx: Context) -> None:
        seen.append(message.payload)

    assert await outcome_of(dispatcher, handler_of(greet, model=Greeting), message_of({"name": "Ann"})) == Sent()
    assert seen == [Greeting(name="Ann")]


async def test_a_sync_handler_runs_in_a_thread_that_is_reported(dispatcher: Dispatcher) -> None:
    threads: list[Future[object]] = []

    class Owner(ThreadOwner):
        def watch_thread(self, thread: Future[object], /) -> None:
            threads.append(thread)

    def greet(message: Message, ctx: SyncContext) -> Skip:
        ctx.ensure_lease()
        return Skip("why")

    thread_owner.set(Owner())
    attempt = Attempt(message_of(), handler_of(greet), Claim(datetime(2024, 1, 1, tzinfo=UTC)), elapsed_clock(), hold)
    (outcome,) = await dispatcher.run([attempt])
    assert isinstance(outcome, Skip)
    assert len(threads) == 1


async def cancelled_on_its_way(
    dispatcher: Dispatcher, function: Callable[[Message, SyncContext], object]
) -> tuple[object, asyncio.Task[object]]:
    """Cancel an attempt whose thread has ended while the event loop was blocked. Return its outcome."""
    threads: asyncio.Queue[Future[object]] = asyncio.Queue()
    may_end = threading.Event()

    class Owner(ThreadOwner):
        def watch_thread(self, thread: Future[object], /) -> None:
            threads.put_nowait(thread)

    def ends_later(message: Message, ctx: SyncContext) -> object:
        may_end.wait(PROCESS_PATIENCE_SECONDS)
        return function(message, ctx)

    thread_owner.set(Owner())
    task = asyncio.create_task(outcome_of(dispatcher, handler_of(ends_later), message_of()))
    thread = await threads.get()
    may_end.set()
    thread.exception(PROCESS_PATIENCE_SECONDS)  # It blocks the event loop.
    task.cancel()
    return await task, task


async def test_a_cancellation_by_the_worker_passes_through(dispatcher: Dispatcher) -> None:
    started = asyncio.Event()

    async def greet(message: Message, ctx: Context) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(outcome_of(dispatcher, handler_of(greet), message_of()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("returned", [None, Skip("why"), ValueError("wrong")])
async def test_an_outcome_on_its_way_from_a_thread_survives_a_cancellation(
    dispatcher: Dispatcher, returned: object
) -> None:
    """The worker once released the message of a handler that had ended, so its effects happened again."""

    def greet(message: Message, ctx: SyncContext) -> object:
        if isinstance(returned, Exception):
            raise returned
        return returned

    outcome, task = await cancelled_on_its_way(dispatcher, greet)
    assert isinstance(outcome, {type(None): Sent, Skip: Skip, ValueError: Transient}[type(returned)])
    assert task.cancelling() == 1, "the slot ends"


async def test_a_content_on_its_way_from_a_thread_is_not_sent_after_a_cancellation(dispatcher: Dispatcher) -> None:
    def greet(message: Message, ctx: SyncContext) -> Email:
        return Email(subject="s", text="t")

    with pytest.raises(asyncio.CancelledError):
        await cancelled_on_its_way(dispatcher, greet)


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain", "plain"),
        ("a\x00b", "a\\x00b"),
        ("\ud800", "\\ud800"),
        ("😀 é\xa0\t\n", "😀 é\xa0\t\n"),
        ("\x1b[31m\x9b\r\x7f", "\\x1b[31m\\x9b\\r\\x7f"),
        ("a\u202eb\u2066c\u2028", "a\\u202eb\\u2066c\\u2028"),
        ("x" * MAX_TEXT_LENGTH, "x" * MAX_TEXT_LENGTH),
        ("x" * (MAX_TEXT_LENGTH + 1), "x" * (MAX_TEXT_LENGTH - 1) + "…"),
    ],
)
def test_a_text_is_sanitized_for_storage(text: str, clean: str) -> None:
    assert clean_text(text) == clean


def test_a_text_that_grows_by_escaping_is_truncated_too() -> None:
    assert len(clean_text("\x00" * MAX_TEXT_LENGTH)) == MAX_TEXT_LENGTH


def test_an_error_without_a_text_shows_its_type() -> None:
    assert describe(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("asked", "granted"),
    [
        (5.0, 5.0),
        (-1.0, 0.0),
        (float("nan"), MAX_DELAY_SECONDS),
        (float("inf"), MAX_DELAY_SECONDS),
        (1e300, MAX_DELAY_SECONDS),
    ],
)
def test_a_delay_is_kept_within_its_bounds(asked: float, granted: float) -> None:
    assert bounded_delay(asked) == granted


class Held:
    """Work that runs until the test ends it."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.may_end.wait(PROCESS_PATIENCE_SECONDS)


def test_work_that_waits_for_a_thread_is_cancelled_with_the_threads() -> None:
    held, threads = Held(), AttemptThreads(1)
    running, waiting = threads.submit(held), threads.submit(held)
    assert held.began.wait(PROCESS_PATIENCE_SECONDS)
    threads.shutdown(wait=False, cancel_futures=True)
    held.may_end.set()
    running.result(PROCESS_PATIENCE_SECONDS)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(held)


def test_others_who_use_the_threads_of_an_application_come_between_works() -> None:
    order: list[str] = []

    def work(number: int) -> None:
        order.append("work")
        if number:
            threads.submit(work, number - 1)
        else:
            ended.set()

    held, ended = Held(), threading.Event()
    with ThreadPoolExecutor(1) as inner:
        threads = AttemptThreads(inner=inner)
        threads.submit(held)
        assert held.began.wait(PROCESS_PATIENCE_SECONDS)
        threads.submit(work, 10)
        inner.submit(order.append, "other")
        held.may_end.set()
        assert ended.wait(PROCESS_PATIENCE_SECONDS)
    assert "other" in order[:3]


def test_work_does_not_wait_for_an_executor_that_its_application_has_shut_down() -> None:
    held, inner = Held(), ThreadPoolExecutor(1)
    threads = AttemptThreads(inner=inner)
    inner.submit(held)
    assert held.began.wait(PROCESS_PATIENCE_SECONDS)
    waiting = threads.submit(held)
    inner.shutdown(wait=False, cancel_futures=True)
    held.may_end.set()
    with pytest.raises(CancelledError):
        waiting.result(PROCESS_PATIENCE_SECONDS)
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(held)


def test_work_that_no_thread_could_begin_does_not_hold_up_later_work() -> None:
    class Unready(ThreadPoolExecutor):
        is_ready = False

        def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
            if not self.is_ready:
                raise OSError("not ready")
            return super().submit(fn, *args, **kwargs)

    with Unready(1) as inner:
        threads = AttemptThreads(inner=inner)
        with pytest.raises(OSError, match="not ready"):
            threads.submit(int)
        inner.is_ready = True
        assert threads.submit(int, "7").result(PROCESS_PATIENCE_SECONDS) == 7


async def test_what_a_failed_handler_has_left_open_ends_with_its_attempt(dispatcher: Dispatcher) -> None:
    """The garbage collector may come minutes later, and a connection of the handler would stay open."""

    class Connection: ...

    opened: list[weakref.ref[Connection]] = []

    def greet(message: Message, ctx: SyncContext) -> None:
        connection = Connection()
        opened.append(weakref.ref(connection))
        raise ValueError("wrong")

    gc.disable()
    try:
        assert isinstance(await outcome_of(dispatcher, handler_of(greet), message_of()), Transient)
        (connection,) = opened
        assert connection() is None
    finally:
        gc.enable()
