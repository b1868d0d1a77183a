"""Handlers: their registration, and the context that each attempt gives them."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final, Literal, Protocol, TypedDict, TypeVar

import psycopg
from psycopg.rows import TupleRow
from pydantic import BaseModel, ValidationError

from pgoutbox.clock import Duration
from pgoutbox.errors import ConfigurationError, StateError
from pgoutbox.message import Message, Outcome, Postponed, ReasonCode, upgraded
from pgoutbox.retry import UNREADABLE_TIMEOUT_SECONDS, RetryPolicy
from pgoutbox.signatures import check_handler, is_async

C = TypeVar("C")

OnUnknown = Literal["retry", "hold"]

# Several workers take turns at an unreadable message by chance, so the first pauses are short.
_UNREADABLE_PAUSES: Final = RetryPolicy.steps(2, 2, 2, 2, 2, 2, 4, 4, 8, 8, 16, 32, 64, 120, jitter=0.5)

# PostgreSQL keeps so many subtransactions of a session in shared memory. With more, all snapshots of all sessions
# take longer.
_MAX_SAVEPOINTS: Final = 64

_NOT_TRANSACTIONAL = "ctx.connection is only for transactional handlers: register this one with transactional=True"


class HandlerOptions(TypedDict, total=False):
    """The options of a handler.

    `retry` is the policy, unless the definition of the topic has one. `timeout` (seconds or a timedelta) is per
    attempt. With `on_unknown="hold"`, a message whose lease expired ends as `failed` instead of being tried again.
    A `transactional` handler writes with `ctx.connection`, and its writes and the completion commit together.
    Exceptions of the `permanent` types are not retried.
    """

    retry: RetryPolicy | None
    timeout: Duration | None
    on_unknown: OnUnknown
    transactional: bool
    permanent: Sequence[type[BaseException]]


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function and the options of its attempts: see `Outbox.handler`.

    A mistake raises `ConfigurationError`, at start-up and not at the first attempt.
    """

    topic: str
    function: Callable[..., Any]
    _: KW_ONLY
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_seconds: float | None = None
    on_unknown: OnUnknown = "retry"
    is_batch: bool = False
    max_size: int | None = None
    """The largest number of messages of a batch, or of messages that share a transaction. None: each is alone."""
    transactional: bool = False
    permanent: Sequence[type[BaseException]] = ()
    payload: type[BaseModel] | None = None
    version: int = 1
    upgrade: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict, hash=False)
    redact: tuple[str, ...] = ()
    mailing_list: str | None = None
    unreadable_timeout_seconds: float = UNREADABLE_TIMEOUT_SECONDS
    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        place = f"handler {getattr(self.function, '__qualname__', repr(self.function))} of topic {self.topic!r}"
        contexts = (Context, SyncContext)
        check_handler(self.function, place=place, contexts=contexts, is_batch=self.is_batch, model=self.payload)
        if not isinstance(self.retry, RetryPolicy):
            raise ConfigurationError(f"{place}: retry={self.retry!r}: must be a RetryPolicy")
        timeout = self.timeout_seconds
        if timeout is not None and not _is_between(timeout, 1e-9, sys.float_info.max):
            raise ConfigurationError(f"{place}: timeout={timeout!r}: must be positive, in seconds or as a timedelta")
        if self.on_unknown not in ("retry", "hold"):
            raise ConfigurationError(f"{place}: on_unknown={self.on_unknown!r}: must be 'retry' or 'hold'")
        most = 5_000 if self.is_batch else _MAX_SAVEPOINTS
        if self.max_size is not None and not _is_between(self.max_size, 1, most):
            raise ConfigurationError(f"{place}: max_size={self.max_size!r}: must be 1 to {most}")
        if self.max_size is not None and not (self.is_batch or self.transactional):
            raise ConfigurationError(
                f"{place}: max_size: needs transactional=True; for a list of messages use batch_handler"
            )
        if not _are_exceptions(self.permanent):
            raise ConfigurationError(f"{place}: permanent={self.permanent!r}: must be a list of exception classes")
        object.__setattr__(self, "permanent", tuple(self.permanent))
        object.__setattr__(self, "is_async", is_async(self.function))

    @property
    def handled(self) -> Sequence[str]:
        """The names by which it claims messages: see the SQL function `_handled_as`."""
        return [self.topic, *(f"{self.topic}@{version}" for version in range(2, self.version + 1))]

    def parse(self, message: Message[object]) -> Message[object]:
        """Return the message with its payload in the version of the topic, as an instance of its model.

        Raises `Postponed` if it does not fit: a worker with another version of the model may be able to read it.
        """
        payload = message.payload
        if message.payload_version != self.version:
            payload = self._upgraded(message)
        elif self.payload is None:
            return message
        if self.payload is None:
            return replace(message, payload=payload)
        try:
            payload = self.payload.model_validate(payload)
        except ValidationError as error:
            places = ", ".join(
                ".".join(("payload", *map(str, e["loc"]))) + f": {e['msg']}"
                for e in error.errors(include_url=False, include_context=False, include_input=False)[:10]
            )
            raise _unreadable(message, f"the payload does not fit the topic's model: {places}") from None
        return replace(message, payload=payload)

    def _upgraded(self, message: Message[object]) -> object:
        """Return the payload of an earlier version in the version of the topic."""
        try:
            return upgraded(message.payload, message.payload_version, self.version, self.upgrade)
        except StateError as error:
            raise _unreadable(message, str(error)) from error.__cause__


def handled_by(handlers: Mapping[str, Handler]) -> list[str]:
    """Return the names by which a worker with these handlers claims messages, in alphabetical order."""
    return sorted(name for handler in handlers.values() for name in handler.handled)


def _unreadable(message: Message[object], text: str) -> Postponed:
    pause = _UNREADABLE_PAUSES.delay_seconds(message.attempt_count)
    return Postponed(pause, text, code=ReasonCode.UNREADABLE)


def _is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _are_exceptions(kinds: object) -> bool:
    return isinstance(kinds, Sequence) and all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds)


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
        """The connection of a transactional handler, in a transaction that the worker opened and will end.

        The handler's writes and the completion of the message commit together or not at all. All contexts of a batch
        have the same connection. `transaction()` makes a savepoint. `commit()` and `rollback()` raise
        `psycopg.ProgrammingError`.
        """

    @property
    @abstractmethod
    def unsubscribe_url(self) -> str:
        """The link with which the recipient unsubscribes from the mailing list of the topic, for the text of the mail.

        The worker adds the headers itself. Raises `ConfigurationError` for a topic without a mailing list, and without
        the settings `unsubscribe.url` and `unsubscribe.keys`.
        """

    @property
    @abstractmethod
    def should_stop(self) -> bool:
        """Whether the attempt has become pointless: cancelled, superseded, expired, or owned by another worker.

        It becomes true within two seconds, unless the handler blocks the event loop. `ensure_lease` asks the database.
        """

    @abstractmethod
    async def ensure_lease(self) -> None:
        """Ensure right before a side effect that this attempt still holds its message, or raise `LeaseLostError`.

        Afterwards at least two thirds of the lease are left. It raises if the message was cancelled, superseded or
        claimed by another worker, or has expired: then the side effect must not happen. Do not catch the error; no
        attempt is used up.
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
        """The connection of a transactional handler, in a transaction that the worker opened and will end."""
        return lent(self._connection)

    @property
    def unsubscribe_url(self) -> str:
        """The link with which the recipient unsubscribes from the mailing list of the topic."""
        return self._context.unsubscribe_url

    @property
    def should_stop(self) -> bool:
        """Whether the attempt has become pointless: cancelled, superseded, expired, or owned by another worker."""
        return self._context.should_stop

    def ensure_lease(self) -> None:
        """Ensure right before a side effect that this attempt still holds its message, or raise `LeaseLostError`."""
        asyncio.run_coroutine_threadsafe(self._context.ensure_lease(), self._loop).result()


def lent(connection: C | None) -> C:
    """Return the connection of a transactional handler, or raise `ConfigurationError` for other handlers."""
    if connection is None:
        raise ConfigurationError(_NOT_TRANSACTIONAL)
    return connection
