"""Tests which callables are accepted as handlers at registration."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import pytest
from pydantic import BaseModel

from pgoutbox import ConfigurationError, Context, Message, Outbox, SyncContext, Topic

if TYPE_CHECKING:
    from elsewhere import Unknown  # type: ignore[import-not-found] # no such module, for what a worker cannot resolve

T = TypeVar("T")


class Thing(BaseModel):
    """A base class of a payload."""


class Order(Thing):
    """The payload of the topic `order`."""

    number: int = 0


class Other(BaseModel):
    """A different payload."""


class HasId(Protocol):
    """A protocol that a helper needs from a message."""

    @property
    def id(self) -> int: ...


class Greeter:
    """A handler with state."""

    async def __call__(self, message: Message, ctx: Context) -> None: ...

    async def greet(self, message: Message, ctx: Context) -> None: ...

    def greet_in_thread(self, message: Message, ctx: SyncContext) -> None: ...


class Swapped:
    """A handler with its parameters in the wrong order."""

    async def __call__(self, ctx: Context, message: Message) -> None: ...


async def bare(message, ctx): ...  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201 - without annotations


async def usual(message: Message, ctx: Context) -> None: ...


async def typed(message: Message[Order], ctx: Context) -> None: ...


async def wider(message: Message[Thing], ctx: object) -> None: ...


async def anything(message: Any, ctx: Any) -> None: ...  # noqa: ANN401 - that is the test


async def generic(message: Message[T], ctx: Annotated[Context, "the attempt"]) -> None: ...


async def either(message: Message[Order] | None, ctx: Context | SyncContext) -> None: ...


async def unresolved(message: "Unknown", ctx: "Context") -> None: ...


async def by_protocol(message: HasId, ctx: Context) -> None: ...


async def spread(*arguments: object) -> None: ...


async def with_more(message: Message, ctx: Context, *, retries: int = 3) -> None: ...


def in_thread(message: Message, ctx: SyncContext) -> None: ...


def injected(function: Callable[[Order, Context], object]) -> Callable[[Message[Order], Context], object]:
    """Decorate with a wrapper that has the annotations of the wrapped function."""

    @functools.wraps(function)
    async def wrapper(message: Message[Order], ctx: Context) -> object:
        return function(message.payload, ctx)

    return wrapper


@injected
def unpacked(message: Order, ctx: Context) -> None: ...


@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        (bare, True),
        (usual, True),
        (typed, True),
        (wider, True),
        (anything, True),
        (generic, True),
        (either, True),
        (unresolved, True),
        (by_protocol, True),
        (spread, True),
        (with_more, True),
        (in_thread, False),
        (unpacked, True),
        (Greeter(), True),
        (Greeter().greet, True),
        (Greeter().greet_in_thread, False),
        (functools.partial(with_more, retries=4), True),
        (functools.partial(Greeter()), True),
        (functools.partial(functools.partial(in_thread)), False),
        (functools.partial(Greeter.greet, Greeter()), True),
        (lambda message, ctx: None, False),
    ],
)
def test_any_callable_for_a_message_and_a_context_is_a_handler(function: Callable[..., Any], is_async: bool) -> None:
    outbox = Outbox()
    outbox.handler(Topic("order", payload=Order))(function)
    assert outbox.handlers["order"].is_async is is_async


@pytest.mark.parametrize("items", [list, Sequence])
def test_a_batch_handler_takes_a_list_or_a_supertype(items: Any) -> None:  # noqa: ANN401 - a generic class
    async def index(messages: items[Message[Order]], contexts: items[Context]) -> None: ...

    def index_in_thread(messages: items, contexts: items) -> None: ...

    outbox = Outbox()
    outbox.batch_handler(Topic("order", payload=Order))(index)
    outbox.batch_handler("in.thread")(index_in_thread)
    assert (outbox.handlers["order"].is_async, outbox.handlers["in.thread"].is_async) == (True, False)


async def swapped(ctx: Context, message: Message) -> None: ...


async def payload_itself(order: Order, ctx: Context) -> None: ...


async def dictionary(message: dict[str, Any], ctx: Context) -> None: ...


async def sync_context(message: Message, ctx: SyncContext) -> None: ...


def async_context(message: Message, ctx: Context) -> None: ...


async def other_payload(message: Message[Other], ctx: Context) -> None: ...


async def raw_payload(message: Message[dict[str, Any]], ctx: Context) -> None: ...


async def batch(messages: list[Message], contexts: list[Context]) -> None: ...


async def async_items(message: Message, ctx: Context) -> AsyncIterator[int]:
    yield 1


def items(message: Message, ctx: SyncContext) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (swapped, "swapped of topic 'order': parameter 'ctx': annotated as .*Context; a worker passes .*ctx: Context"),
        (Swapped(), "parameter 'ctx': annotated as .*Context; a worker passes"),
        (functools.partial(swapped), "parameter 'ctx': annotated as .*Context; a worker passes"),
        (
            payload_itself,
            r"parameter 'order': annotated as .*Order; a worker passes \(message: Message, ctx: Context\)",
        ),
        (dictionary, r"parameter 'message': annotated as dict\[str, .*Any\]; a worker passes"),
        (sync_context, "parameter 'ctx': annotated as .*SyncContext; a worker passes .*ctx: Context"),
        (async_context, "parameter 'ctx': annotated as .*Context; a worker passes .*ctx: SyncContext"),
        (other_payload, "parameter 'message': expects .*Other, but the topic's payload is a Order"),
        (raw_payload, r"parameter 'message': expects dict\[.*\], but the topic's payload is a Order"),
        (batch, "parameter 'messages': annotated as list.*; a worker passes"),
        (async_items, "async_items of topic 'order': is a generator; a handler must return its result"),
        (functools.partial(async_items), "is a generator"),
        (items, "is a generator"),
        (Greeter, "Greeter of topic 'order': is a class; register a function, or an instance"),
        (7, "handler 7 of topic 'order': must be a function, got 7"),
        (Greeter.greet, "must take two arguments, the message and the context"),
    ],
)
def test_an_unusable_handler_is_refused_at_registration(function: Any, problem: str) -> None:  # noqa: ANN401
    outbox = Outbox()
    with pytest.raises(ConfigurationError, match=problem):
        outbox.handler(Topic("order", payload=Order))(function)
    assert outbox.handlers == {}


def test_a_model_other_than_the_topics_is_refused() -> None:
    outbox = Outbox()
    function: Any = typed
    with pytest.raises(ConfigurationError, match="expects a Order, but the topic has no payload model; define it with"):
        outbox.handler("order")(function)
    assert outbox.handlers == {}


async def one_by_one(message: Message, ctx: Context) -> None: ...


async def of_contexts(messages: list[Context], contexts: list[Context]) -> None: ...


async def of_sync_contexts(messages: list[Message], contexts: list[SyncContext]) -> None: ...


async def of_tuples(messages: tuple[Message, ...], contexts: list[Context]) -> None: ...


async def of_others(messages: Sequence[Message[Other]], contexts: Sequence[Context]) -> None: ...


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (one_by_one, r"'message': annotated as .*Message; a worker passes \(messages: Sequence\[Message\], contexts: "),
        (of_contexts, "parameter 'messages': annotated as list"),
        (of_sync_contexts, "parameter 'contexts': annotated as list"),
        (of_tuples, "parameter 'messages': annotated as tuple"),
        (of_others, "parameter 'messages': expects .*Other, but the topic's payload is a Order"),
        (lambda messages: None, "must take two arguments, lists of messages and of contexts"),
    ],
)
def test_a_batch_handler_that_does_not_take_lists_is_refused(function: Any, problem: str) -> None:  # noqa: ANN401
    outbox = Outbox()
    with pytest.raises(ConfigurationError, match=problem):
        outbox.batch_handler(Topic("order", payload=Order))(function)
    assert outbox.handlers == {}
