"""Handlers: their registration, and the context that each attempt gives them."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar, cast

import psycopg
from psycopg.rows import TupleRow
from pydantic import BaseModel, TypeAdapter, ValidationError

from pgoutbox.clock import Duration
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message, Outcome, Permanent
from pgoutbox.retry import RetryPolicy
from pgoutbox.signatures import check_handler, is_async

C = TypeVar("C")

OnUnknown = Literal["retry", "hold"]

_NOT_TRANSACTIONAL = "ctx.connection is only for transactional handlers: register this one with transactional=True"


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function and the options of its attempts."""

    topic: str
    function: Callable[..., Any]
    is_async: bool
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_seconds: float | None = None
    on_unknown: OnUnknown = "retry"
    max_batch: int | None = None
    transactional: bool = False
    permanent_errors: tuple[type[BaseException], ...] = ()
    payload_adapter: TypeAdapter[object] | None = None
    redact: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        topic: str,
        function: Callable[..., object],
        *,
        retry: RetryPolicy,
        timeout: Duration | None,
        on_unknown: OnUnknown,
        max_batch: int | None,
        transactional: bool,
        permanent_errors: Sequence[type[BaseException]],
        payload_model: type[BaseModel] | None,
        redact: tuple[str, ...] = (),
    ) -> Handler:
        """Check a registration, so that a mistake is a `ConfigurationError` at start-up and not a failed attempt."""
        place = f"handler {getattr(function, '__qualname__', repr(function))} of topic {topic!r}"
        check_handler(
            function, place=place, contexts=(Context, SyncContext), is_batch=max_batch is not None, model=payload_model
        )
        if not _is_policy(retry):
            raise ConfigurationError(f"{place}: retry={retry!r}: must be a RetryPolicy")
        timeout_seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if timeout_seconds is not None and not _is_between(timeout_seconds, 1e-9, sys.float_info.max):
            raise ConfigurationError(f"{place}: timeout={timeout!r}: must be positive, in seconds or as a timedelta")
        if on_unknown not in ("retry", "hold"):
            raise ConfigurationError(f"{place}: on_unknown={on_unknown!r}: must be 'retry' or 'hold'")
        if max_batch is not None and not _is_between(max_batch, 1, 5_000):
            raise ConfigurationError(f"{place}: max_size={max_batch!r}: must be 1 to 5000")
        if not _are_exceptions(permanent_errors):
            raise ConfigurationError(f"{place}: permanent={permanent_errors!r}: must be a list of exception classes")
        return cls(
            topic=topic,
            function=function,
            is_async=is_async(function),
            retry=retry,
            timeout_seconds=timeout_seconds,
            on_unknown=on_unknown,
            max_batch=max_batch,
            transactional=transactional,
            permanent_errors=tuple(permanent_errors),
            payload_adapter=None if payload_model is None else cast("TypeAdapter[object]", TypeAdapter(payload_model)),
            redact=redact,
        )

    def parse(self, message: Message[object]) -> Message[object]:
        """Return the message with its payload as an instance of the topic's model."""
        if self.payload_adapter is None:
            return message
        try:
            payload = self.payload_adapter.validate_python(message.payload)
        except ValidationError as error:
            places = ", ".join(
                ".".join(("payload", *map(str, e["loc"]))) + f": {e['msg']}"
                for e in error.errors(include_url=False, include_context=False, include_input=False)[:10]
            )
            raise Permanent(f"the payload does not fit the topic's model: {places}") from None
        return replace(message, payload=payload)


def _is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _are_exceptions(kinds: object) -> bool:
    return isinstance(kinds, Sequence) and all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds)


def _is_policy(retry: object) -> bool:
    return isinstance(retry, RetryPolicy)


class CallNext(Protocol):
    """The rest of the chain: the next middleware, or the handler. Call it at most once."""

    def __call__(self) -> Awaitable[Sequence[Outcome]]:
        """Return an outcome for each message, in their order."""
        ...


class Middleware(Protocol):
    """An async function that wraps each call of a handler: see `Outbox.middleware`."""

    def __call__(self, messages: Sequence[Message[Any]], call_next: CallNext, /) -> Awaitable[Sequence[Outcome]]:
        """Return an outcome for each message, in their order."""
        ...


class Context(ABC):
    """One attempt, as an async handler sees it."""

    __slots__ = ()

    @property
    @abstractmethod
    def connection(self) -> psycopg.AsyncConnection[TupleRow]:
        """The transaction of a transactional handler: write with it and do not commit.

        The handler's writes and the completion of the message commit together or not at all.
        """

    @property
    @abstractmethod
    def should_stop(self) -> bool:
        """Whether the attempt has become pointless: cancelled, superseded, or owned by another worker.

        It becomes true within two seconds, unless the handler blocks the event loop. `ensure_lease` asks the database.
        """

    @abstractmethod
    async def ensure_lease(self) -> None:
        """Ensure right before a side effect that this attempt still holds its message, or raise `LeaseLostError`.

        Afterwards at least two thirds of the lease are left. It raises if the message was cancelled, superseded or
        claimed by another worker: then the side effect must not happen. Do not catch the error; the message is retried
        only if it has to be.
        """


class SyncContext:
    """One attempt, as a handler in a thread sees it: `Context` without `await`."""

    __slots__ = ("_connection", "_context", "_loop")

    def __init__(
        self,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        connection: psycopg.Connection[TupleRow] | None = None,
    ) -> None:
        self._context = context
        self._loop = loop
        self._connection = connection

    @property
    def connection(self) -> psycopg.Connection[TupleRow]:
        """The transaction of a transactional handler: write with it and do not commit."""
        return lent(self._connection)

    @property
    def should_stop(self) -> bool:
        """Whether the attempt has become pointless: cancelled, superseded, or owned by another worker."""
        return self._context.should_stop

    def ensure_lease(self) -> None:
        """Ensure right before a side effect that this attempt still holds its message, or raise `LeaseLostError`."""
        asyncio.run_coroutine_threadsafe(self._context.ensure_lease(), self._loop).result()


def lent(connection: C | None) -> C:
    """Return the connection of a transactional handler, or raise `ConfigurationError` for other handlers."""
    if connection is None:
        raise ConfigurationError(_NOT_TRANSACTIONAL)
    return connection
