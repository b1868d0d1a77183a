"""From a claimed message and its handler to an outcome. No SQL: what an outcome does to the row is not known here.

Whatever a handler does (return nonsense, raise an exception that cannot be printed, exit the interpreter) becomes one
of the six outcomes. Only a genuine cancellation by the worker passes through.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Final, Literal, cast

import psycopg
from psycopg.rows import TupleRow
from pydantic import BaseModel, TypeAdapter, ValidationError

from pgoutbox.errors import ConfigurationError, LeaseLostError
from pgoutbox.message import Message, Outcome, Permanent, Sent, Skip, Snooze, Transient, Unavailable
from pgoutbox.retry import MAX_DELAY_SECONDS, RetryPolicy
from pgoutbox.signatures import check_handler, is_async
from pgoutbox.transports import Content, Transport, scheme_of
from pgoutbox.transports.configured import MissingTransport

MAX_TEXT_LENGTH = 4_000
MIN_SNOOZE_SECONDS = 1.0
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_NOT_TRANSACTIONAL = "ctx.connection is for transactional handlers: register this one with transactional=True"

OnUnknown = Literal["retry", "hold"]
Send = Callable[[Transport, Message[object], Content], Awaitable[Outcome]]

_SENT_ALONE: Final = (Sent(),)


def elapsed_clock() -> float:
    """Seconds on a clock that also counts while the machine is suspended. For ages only; the database has the time."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function and the rules of its attempts."""

    topic: str
    function: Callable[..., object]
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
        timeout_seconds: float | None,
        on_unknown: OnUnknown,
        max_batch: int | None,
        transactional: bool,
        permanent_errors: Sequence[type[BaseException]],
        payload_model: type[BaseModel] | None,
        redact: tuple[str, ...] = (),
    ) -> Handler:
        """Check a registration: a mistake is a `ConfigurationError` at start-up, not a failed attempt."""
        place = f"handler {getattr(function, '__qualname__', repr(function))} of topic {topic!r}"
        check_handler(
            function, place=place, contexts=(Context, SyncContext), is_batch=max_batch is not None, model=payload_model
        )
        if not _is_policy(retry):
            raise ConfigurationError(f"{place}: retry={retry!r}: must be a RetryPolicy")
        if timeout_seconds is not None and not _is_between(timeout_seconds, 1e-9, sys.float_info.max):
            raise ConfigurationError(f"{place}: timeout={timeout_seconds!r}: must be positive seconds")
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
        """The message with its payload as an instance of the topic's model."""
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


class Context:
    """One attempt, from its claim to its finish, as an async handler sees it."""

    __slots__ = (
        "_connection",
        "_ensure",
        "attempt_count",
        "done",
        "expiring_at",
        "handler",
        "leased_at",
        "message",
        "overtaken",
        "used_count",
    )

    def __init__(
        self,
        message: Message[object],
        handler: Handler,
        leased_at: float,
        ensure: Callable[[Context], Awaitable[None]],
        used_count: int | None = None,
    ) -> None:
        self.message = message
        # The fencing token. The message keeps the number that its handler was given: see `take_over`.
        self.attempt_count = message.attempt_count
        self.handler = handler
        self.leased_at = leased_at
        # How many attempts this one makes that were used up: snoozes, releases and what was before a redrive are not.
        self.used_count = message.attempt_count if used_count is None else used_count
        self.overtaken: str | None = None
        self.done = False
        self.expiring_at = math.inf  # On `elapsed_clock`, as `leased_at`: what begins later is too late.
        self._connection: psycopg.AsyncConnection[TupleRow] | None = None
        self._ensure = ensure

    @property
    def cancelled(self) -> bool:
        """Whether the attempt has become pointless: cancelled, superseded, or owned by another worker.

        Known within two seconds, if the handler lets the event loop run; `ensure_lease` asks the database.
        """
        return self.overtaken is not None

    @property
    def connection(self) -> psycopg.AsyncConnection[TupleRow]:
        """The transaction of a transactional handler: write with it and do not commit.

        What is written and the completion of the message commit together or not at all.
        """
        if self._connection is None:
            raise ConfigurationError(_NOT_TRANSACTIONAL)
        return self._connection

    def join(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        """Give the handler its transaction. For the worker."""
        self._connection = connection

    def take_over(self, attempt_count: int, leased_at: float) -> None:
        """Go on under another claim by the same worker, after the server has lost the first one. For the worker."""
        self.attempt_count = attempt_count
        self.leased_at = leased_at
        self.overtaken = None

    async def ensure_lease(self) -> None:
        """Make sure of the lease right before a side effect, or raise `LeaseLostError`.

        After it, two thirds of the lease are left at least. Raises when the message was cancelled, superseded or
        claimed by another worker: then the side effect must not happen any more. Let the error out; the message is not
        retried because of it unless it has to be.
        """
        await self._ensure(self)


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
        if self._connection is None:
            raise ConfigurationError(_NOT_TRANSACTIONAL)
        return self._connection

    @property
    def cancelled(self) -> bool:
        """Whether the attempt has become pointless: cancelled, superseded, or owned by another worker."""
        return self._context.cancelled

    def ensure_lease(self) -> None:
        """Make sure of the lease right before a side effect, or raise `LeaseLostError`."""
        asyncio.run_coroutine_threadsafe(self._context.ensure_lease(), self._loop).result()


class Dispatcher:
    """Runs handlers and sends what they render."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        threads: Executor,
        *,
        lease_seconds: float,
        redirect_to: str | None = None,
        send: Send | None = None,
    ) -> None:
        self._transports = transports
        self._redirect_to = redirect_to
        self._threads = threads
        self._lease_seconds = lease_seconds
        self._send = send or send_by

    async def run(
        self, contexts: Sequence[Context], watch_thread: Callable[[Future[object]], None]
    ) -> Sequence[Outcome]:
        """One attempt of one message, its outcome alone in the answer.

        `watch_thread` is given the future of the thread, if one is used.
        """
        (context,) = contexts
        handler = context.handler
        try:
            message = context.message if handler.payload_adapter is None else handler.parse(context.message)
            if handler.is_async:
                result = await cast("Awaitable[object]", handler.function(message, context))
            else:
                result = await self._run_in_thread(handler, message, context, watch_thread)
            if result is None:
                return _SENT_ALONE
            return (await self.conclude(context, message, result),)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is the outcome of its attempt
            return (outcome_of_error(handler, error),)

    async def run_batch(
        self, contexts: Sequence[Context], watch_thread: Callable[[Future[object]], None]
    ) -> list[Outcome]:
        """One attempt of several messages of one handler; an outcome for each, in their order."""
        handler = contexts[0].handler
        outcomes: dict[int, Outcome] = {}
        parsed: list[tuple[Message[object], Context]] = []
        for context in contexts:
            try:
                parsed.append((handler.parse(context.message), context))
            except Permanent as refused:
                outcomes[context.message.id] = refused
        if parsed:
            messages = [message for message, _ in parsed]
            results = await self._run_batch_handler(handler, messages, [c for _, c in parsed], watch_thread)
            for (message, context), result in zip(parsed, results, strict=True):
                try:
                    outcomes[message.id] = await self._conclude_safely(context, message, result)
                except asyncio.CancelledError:
                    # What was sent was sent. This one may have been; those behind it were not.
                    outcomes[message.id] = _interrupted(handler)
                    outcomes = {m.id: Snooze(0) for m in messages} | outcomes
                    break
        return [outcomes[context.message.id] for context in contexts]

    async def _run_batch_handler(
        self,
        handler: Handler,
        messages: list[Message[object]],
        contexts: list[Context],
        watch_thread: Callable[[Future[object]], None],
    ) -> Sequence[object]:
        try:
            if handler.is_async:
                results = await cast("Awaitable[object]", handler.function(messages, contexts))
            else:
                loop = asyncio.get_running_loop()
                arguments = (messages, [SyncContext(c, loop) for c in contexts])
                results = await in_thread(self._threads, watch_thread, handler.function, *arguments)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is the outcome of its attempt
            return [outcome_of_error(handler, error)] * len(messages)
        if results is None:
            return [None] * len(messages)
        if not isinstance(results, Sequence) or isinstance(results, (str, bytes)) or len(results) != len(messages):
            problem = f"the batch handler must return None or {len(messages)} outcomes, one per message, in their order"
            return [Permanent(problem)] * len(messages)
        return results

    async def _run_in_thread(
        self,
        handler: Handler,
        message: Message[object],
        context: Context,
        watch_thread: Callable[[Future[object]], None],
    ) -> object:
        thread_context = SyncContext(context, asyncio.get_running_loop())
        return await in_thread(self._threads, watch_thread, handler.function, message, thread_context)

    async def _conclude_safely(self, context: Context, message: Message[object], result: object) -> Outcome:
        try:
            return await self.conclude(context, message, result)
        except BaseException as error:  # noqa: BLE001 - one message of a batch never decides about the others
            return outcome_of_error(context.handler, error)

    async def conclude(self, context: Context, message: Message[object], result: object) -> Outcome:
        """The outcome that a handler's result means; a content is sent. `message` has its payload parsed."""
        match result:
            case None:
                return Sent()
            case Snooze():
                return _with_a_pause(result)
            case Sent() | Transient() | Unavailable() | Permanent() | Skip():
                return _unless_on_hold(context.handler, result)
            case Content():
                # The process may have been suspended since the handler began: ask before anything is handed over.
                if context.overtaken is not None or context.leased_at < elapsed_clock() - self._lease_seconds / 2:
                    try:
                        await context.ensure_lease()
                    except (psycopg.Error, OSError):
                        return Snooze(0)  # Nothing was handed over, so no attempt is used up.
                return _unless_on_hold(context.handler, await self.deliver(message, result))
            case _:
                return Permanent(
                    f"the handler returned a {type(result).__name__}; it must return None, an outcome, or a content "
                    "such as Email"
                )

    async def deliver(self, message: Message[object], content: Content) -> Outcome:
        """Send a content by the transport of the message's destination."""
        scheme = scheme_of(message.destination) if message.destination is not None else content.scheme
        if not scheme:
            return Permanent(f"destination: the message has none, and its {type(content).__name__} needs one")
        transport = self._transports.get(scheme)
        if transport is None:
            return await self._send(MissingTransport(scheme, self._transports), message, content)
        if getattr(transport, "redirect_to", None) != self._redirect_to:
            # Kept, not skipped: should the redirect be a mistake, everything goes out once it is taken away.
            return Unavailable(f"not sent: the transport of {scheme!r} does not follow PGOUTBOX_REDIRECT_TO")
        return await self._send(transport, message, content)


async def send_by(transport: Transport, message: Message[object], content: Content) -> Outcome:
    """`transport.send`, as a function."""
    return await transport.send(message, content)


def _unless_on_hold(handler: Handler, outcome: Outcome) -> Outcome:
    """What may have been handed over is not tried again where that is for a person to find out."""
    if isinstance(outcome, Transient) and outcome.unknown and handler.on_unknown == "hold":
        return Permanent(outcome.error)
    return outcome


def _interrupted(handler: Handler) -> Outcome:
    reason = "stopped while it was being sent, outcome unknown"
    return Permanent(reason) if handler.on_unknown == "hold" else Transient(reason)


async def in_thread(
    threads: Executor,
    watch_thread: Callable[[Future[object]], None],
    function: Callable[..., object],
    *arguments: object,
) -> object:
    """What the function returns or raises in a thread.

    Its exception leaves the thread as a value: a future refuses `StopIteration` (Python 3.11), and a `GeneratorExit`
    that a task is woken with closes every coroutine on its way, the slot's too.
    """

    def call() -> tuple[object, BaseException | None]:
        try:
            return function(*arguments), None
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            return None, error

    # The thread sees what the task sees: the current span, for one.
    future = threads.submit(copy_context().run, call)
    watch_thread(cast("Future[object]", future))
    result, error = await asyncio.wrap_future(future)
    if isinstance(error, StopIteration):
        raise RuntimeError(describe(error)) from error  # noqa: TRY004 - what a coroutine would raise
    if error is not None:
        raise error
    return result


def outcome_of_error(handler: Handler, error: BaseException) -> Outcome:
    """What an exception means: the outcome that was raised, `Permanent` for the handler's list, else `Transient`."""
    match error:
        case Snooze():
            return _with_a_pause(error)
        case Transient() | Unavailable() | Permanent() | Skip():
            return _unless_on_hold(handler, error)
        case asyncio.CancelledError() if _is_being_cancelled():
            raise error
        case LeaseLostError():
            return Transient(describe(error))  # What overtook it decides, not the handler's list.
        case _:
            text = describe(error)
            return Permanent(text) if isinstance(error, handler.permanent_errors) else Transient(text)


def _with_a_pause(asked: Snooze) -> Snooze:
    # A message that is due again at once would be claimed a thousand times a second, with a row for each attempt.
    return asked if asked.delay_seconds >= MIN_SNOOZE_SECONDS else Snooze(MIN_SNOOZE_SECONDS, asked.reason)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def describe(error: BaseException) -> str:
    """The error's type and text, fit for the column `last_error`, whatever its `__str__` does."""
    try:
        text = str(error)
    except BaseException as failure:  # noqa: BLE001 - an error that cannot be printed must not keep its message
        text = f"(its text cannot be read: {type(failure).__name__})"
    name = type(error).__name__
    return clean_text(f"{name}: {text}" if text else name)


def clean_text(text: str) -> str:
    """Text that PostgreSQL can store: no NUL, no lone surrogates, at most 4000 characters."""
    cut = text if len(text) <= MAX_TEXT_LENGTH else text[: MAX_TEXT_LENGTH - 1] + "…"
    return cut.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")[:MAX_TEXT_LENGTH]


def bounded_delay(seconds: float) -> float:
    """A delay that a handler asked for, made finite and kept within 0 and 30 days."""
    if not math.isfinite(seconds):
        return MAX_DELAY_SECONDS
    return min(max(seconds, 0.0), MAX_DELAY_SECONDS)
