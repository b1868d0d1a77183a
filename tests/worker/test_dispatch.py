"""Tests the way from a message and its handler to an outcome, without a database."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import pytest
from pydantic import BaseModel

from pgoutbox import Outbox
from pgoutbox.clock import Duration, elapsed_clock
from pgoutbox.errors import ConfigurationError
from pgoutbox.handlers import Context, Handler, SyncContext
from pgoutbox.message import (
    Message,
    Outcome,
    Postponed,
    ReasonCode,
    Sent,
    Skip,
    Transient,
    Unavailable,
)
from pgoutbox.retry import MAX_DELAY_SECONDS, bounded_delay
from pgoutbox.text import MAX_TEXT_LENGTH, clean_text, describe
from pgoutbox.worker.attempt import Attempt, Claim
from pgoutbox.worker.dispatcher import Dispatcher
from pgoutbox.worker.threads import AttemptThreads, ThreadOwner, thread_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgoutbox.handlers import OnUnknown
    from pgoutbox.transports import Content, Transport


class Greeting(BaseModel):
    """The payload model of these tests."""

    name: str
    age: int = 0


class Card:
    """An example content."""

    scheme = "post"


class Post:
    """A transport that records its contents."""

    schemes = ("post",)

    def __init__(self) -> None:
        self.sent: list[Content] = []

    async def send(self, message: Message[object], content: Content) -> Outcome:
        self.sent.append(content)
        return Transient("strike")

    async def aclose(self) -> None: ...


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
def post() -> Post:
    """Return a transport of scheme `post`."""
    return Post()


@pytest.fixture
def dispatcher(post: Post) -> Iterator[Dispatcher]:
    """Return a dispatcher with that transport and one thread."""
    with AttemptThreads(1) as threads:
        yield Dispatcher({"post": cast("Transport", post)}, threads)


async def outcome_of(dispatcher: Dispatcher, handler: Handler, message: Message[object]) -> Outcome:
    (outcome,) = await dispatcher.run(
        [Attempt(message, handler, Claim(datetime(2024, 1, 1, tzinfo=UTC)), elapsed_clock(), hold)]
    )
    return outcome


# --- registration -----------------------------------------------------------------------------------------------------


def test_a_handler_that_does_not_take_two_arguments_is_refused_by_name() -> None:
    def lonely(message: object) -> None: ...

    with pytest.raises(ConfigurationError, match=r"lonely of topic 'greet': must take two arguments"):
        handler_of(lonely)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), timedelta(seconds=-1)])
def test_a_timeout_must_be_positive(timeout: Duration) -> None:
    with pytest.raises(ConfigurationError, match="timeout="):
        Outbox().handler("greet", timeout=timeout)(lambda message, ctx: None)


def test_an_unknown_value_of_on_unknown_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="on_unknown='ignore'"):
        handler_of(lambda message, ctx: None, on_unknown=cast("OnUnknown", "ignore"))


@pytest.mark.parametrize("size", [0, 5001])
def test_a_batch_size_out_of_bounds_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"max_size={size}: must be 1 to 5000"):
        handler_of(lambda message, ctx: None, max_size=size)


def test_a_callable_object_with_an_async_call_is_async() -> None:
    class Greeter:
        async def __call__(self, message: object, ctx: object) -> None: ...

    assert handler_of(Greeter()).is_async
    assert not handler_of(lambda message, ctx: None).is_async


# --- payloads ---------------------------------------------------------------------------------------------------------


async def test_a_handler_gets_its_payload_as_the_model(dispatcher: Dispatcher) -> None:
    seen: list[object] = []

    async def greet(message: Message[Greeting], ctx: Context) -> None:
        seen.append(message.payload)

    assert await outcome_of(dispatcher, handler_of(greet, model=Greeting), message_of({"name": "Ann"})) == Sent()
    assert seen == [Greeting(name="Ann")]


async def test_a_payload_that_does_not_match_the_model_waits_for_another_worker(dispatcher: Dispatcher) -> None:
    async def greet(message: Message[Greeting], ctx: Context) -> None:
        raise AssertionError("never runs")

    message = message_of({"name": "s3cret", "age": "s3cret"})
    outcome = await outcome_of(dispatcher, handler_of(greet, model=Greeting), message)
    assert isinstance(outcome, Postponed)
    assert outcome.code is ReasonCode.UNREADABLE
    assert "payload.age" in str(outcome.reason)
    assert "s3cret" not in str(outcome.reason)


async def test_in_a_batch_only_the_message_with_the_unreadable_payload_waits(dispatcher: Dispatcher) -> None:
    async def greet(messages: list[Message[Greeting]], contexts: list[Context]) -> list[Outcome]:
        return [Skip(message.payload.name) for message in messages]

    handler = handler_of(greet, model=Greeting, max_size=10)
    messages = [message_of({"name": "Ann"}), message_of({}, message_id=2), message_of({"name": "Bo"}, message_id=3)]
    attempts = [
        Attempt(message, handler, Claim(datetime(2024, 1, 1, tzinfo=UTC)), elapsed_clock(), hold)
        for message in messages
    ]
    first, second, third = await dispatcher.run_batch(attempts)
    assert isinstance(first, Skip)
    assert isinstance(second, Postponed)
    assert isinstance(third, Skip)
    assert (first.reason, third.reason) == ("Ann", "Bo")


# --- delivery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("destination", [None, "post:box-7", "POST:box-7"])
async def test_a_content_is_sent_by_the_transport_of_its_scheme(
    dispatcher: Dispatcher, post: Post, destination: str | None
) -> None:
    async def greet(message: Message, ctx: Context) -> Card:
        return Card()

    outcome = await outcome_of(dispatcher, handler_of(greet), message_of(destination=destination))
    assert isinstance(outcome, Transient)
    assert outcome.error == "strike"
    assert len(post.sent) == 1


async def test_the_destination_takes_precedence_over_the_content(dispatcher: Dispatcher, post: Post) -> None:
    async def greet(message: Message, ctx: Context) -> Card:
        return Card()

    outcome = await outcome_of(dispatcher, handler_of(greet), message_of(destination="fax:1"))
    assert isinstance(outcome, Unavailable), "settings can be fixed, and then the message is sent"
    assert "'fax'" in outcome.error
    assert "it has: post" in outcome.error
    assert post.sent == []


@pytest.mark.parametrize(
    ("destination", "hint"),
    [
        ("mailto:a@example.org", "; set PGOUTBOX_SMTP_HOST or PGOUTBOX_SENDMAIL"),
        ("https://a.test", "; pip install 'pgoutbox[webhook]'"),
        ("http://a.test", "; use https, or set PGOUTBOX_WEBHOOK_ALLOW_HTTP"),
        ("fax:1", ""),
    ],
)
async def test_a_missing_transport_is_named_with_its_remedy(
    dispatcher: Dispatcher, destination: str, hint: str
) -> None:
    async def greet(message: Message, ctx: Context) -> Card:
        return Card()

    outcome = await outcome_of(dispatcher, handler_of(greet), message_of(destination=destination))
    assert isinstance(outcome, Unavailable)
    assert outcome.error.endswith(f"(it has: post){hint}")


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


async def test_a_raised_outcome_wins_over_the_permanent_list(
    dispatcher: Dispatcher,
) -> None:
    async def greet(message: Message, ctx: Context) -> None:
        raise Transient("busy")

    assert isinstance(await outcome_of(dispatcher, handler_of(greet, permanent=(Exception,)), message_of()), Transient)


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
