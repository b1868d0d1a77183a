"""Helpers of all transport tests: the message to send, closing of transports, and the outcome."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pgoutbox.message import Message, Permanent, Snooze, Transient, Unavailable
from pgoutbox.transports import current_gate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from pgoutbox.message import Outcome
    from pgoutbox.transports import Transport

P = ParamSpec("P")
T = TypeVar("T", bound="Transport")


def outgoing(
    *, message_id: int = 7, topic: str = "welcome", attempt_count: int = 1, destination: str | None = None
) -> Message[object]:
    """Return a claimed message, as the worker gives it to a transport."""
    created_at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    return Message(
        id=message_id,
        topic=topic,
        queue="default",
        destination=destination,
        payload={},
        headers={},
        attempt_count=attempt_count,
        max_attempts=11,
        created_at=created_at,
        available_at=created_at,
        coalesce_key=None,
    )


@asynccontextmanager
async def closing(make: Callable[P, T]) -> AsyncIterator[Callable[P, T]]:
    """Create transports with `make`, and close them at the end."""
    async with AsyncExitStack() as stack:

        def make_one(*arguments: P.args, **options: P.kwargs) -> T:
            transport = make(*arguments, **options)
            stack.push_async_callback(transport.aclose)
            return transport

        yield make_one


@contextmanager
def closed_gate() -> Iterator[list[None]]:
    """Let no hand-over pass its gate. Yield a list with one item for each question."""
    asked: list[None] = []

    async def refuse() -> None:
        asked.append(None)
        raise Snooze(1, "the gate is closed")

    with gate(refuse):
        yield asked


@contextmanager
def gate(ask: Callable[[], Coroutine[object, object, None]]) -> Iterator[None]:
    """Let each hand-over call `ask` at its gate."""
    token = current_gate.set(ask)
    try:
        yield
    finally:
        current_gate.reset(token)


def refusal_of(outcome: Outcome) -> str:
    """Return the breaker and the error of an outcome that is `Unavailable`."""
    assert isinstance(outcome, Unavailable), outcome
    return f"{outcome.breaker}: {outcome.error}"


def error_of(outcome: Outcome, kind: type[Transient | Unavailable | Permanent]) -> str:
    """Return the error of an outcome, which must be of this kind."""
    assert isinstance(outcome, kind), outcome
    return outcome.error
