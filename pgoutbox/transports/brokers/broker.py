"""The common part of the brokers' transports, and the connection that all sends of a transport share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from pgoutbox.message import Message, Outcome, Permanent, SendFailure, Sent, Snooze, Unavailable
from pgoutbox.text import one_line
from pgoutbox.transports.brokers.events import CloudEvent, RenderedEvent, render, source_key
from pgoutbox.transports.tls import describe_refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pgoutbox.settings import Settings
    from pgoutbox.transports import Content

# Acknowledgements are short. A broker that announces a longer answer is disconnected before it arrives.
MAX_ANSWER_BYTES: Final = 1_000_000

C = TypeVar("C")
T = TypeVar("T")


class BrokerTransport(ABC, Generic[T, C]):
    """A transport that hands each event to a broker once; only the retry policy repeats.

    `T` is the parsed destination, `_kind` its name, as in "topic". `C` is the connection. `_refusals` are the errors of
    refused credentials. `_secrets` are never part of an error's text.
    """

    schemes: tuple[str, ...]
    _kind: str
    _refusals: tuple[type[Exception], ...] = ()
    _secrets: tuple[str, ...] = ()

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seconds = settings.broker_timeout_seconds

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the event over once. `Sent` means that the broker has acknowledged it.

        Any error of a driver is an outcome: hostile answers raise errors that no driver documents.
        """
        try:
            event = render(content, message, self._settings)
            target = self._target(message, event.key)
        except (Permanent, Unavailable) as refusal:
            return refusal
        try:
            connection = await self._connected(target)
        except Exception as error:  # noqa: BLE001 - nothing was handed over, whatever it was
            return self._unconnected(error)
        try:
            return await self._publish(connection, target, event)
        except Snooze as refusal:
            return refusal
        except Exception as error:  # noqa: BLE001 - the event may have been accepted, whatever it was
            text = f"outcome unknown: no acknowledgement: {self._error_text(error)}"
            return SendFailure(text, outage=True, unknown=True)

    def part_keys(self, message: Message[object], content: Content) -> Sequence[str]:
        """Return the keys of the target, and of the source of the settings if the event has none of its own."""
        if not isinstance(content, CloudEvent):
            return ()
        source = source_key(content)
        try:
            target_keys = self._target_keys(self._target(message, content.key))
        except Permanent:  # `send` reports it.
            target_keys = ()
        return (*target_keys, *(() if source is None else (source,)))

    async def check(self) -> Outcome:
        """Connect and sign in as for an event, and return the outcome."""
        try:
            await self._probe(await self._connected(None))
        except Exception as error:  # noqa: BLE001 - as in `send`
            return self._unconnected(error)
        return Sent()

    @abstractmethod
    async def _connected(self, target: T | None) -> C:
        """Return a connection for the target, or for a check, signed in. Raises the error, also that of a timeout."""

    async def _probe(self, connection: C) -> None:
        """Check that the connection works, if `_connected` does not."""

    def _unconnected(self, error: Exception) -> Outcome:
        text = f"connect: {self._error_text(error)}"
        return Unavailable(text) if self._is_refused(error) else SendFailure(text, outage=True)

    def _is_refused(self, error: Exception) -> bool:
        return isinstance(error, self._refusals)

    @abstractmethod
    async def aclose(self) -> None:
        """Close every connection."""

    @abstractmethod
    def _target(self, message: Message[object], key: str | None) -> T:
        """Return the parsed destination, for an event with this key. Raises `Permanent` for an invalid one."""

    def _target_keys(self, target: T) -> Sequence[str]:
        """Return the keys of the breakers that open while the target is missing, or refuses this user."""
        return (self._target_key(target),)

    def _target_key(self, target: T) -> str:
        return f"{self.schemes[0]}:{self._kind} {target}"

    @abstractmethod
    async def _publish(self, connection: C, target: T, event: RenderedEvent) -> Outcome:
        """Hand the event over once, after `pass_gate`. Raises errors after which the event may have been accepted."""

    def _error_text(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._seconds:g} s"
        return describe_refusal(error) or self._one_line(str(error) or type(error).__name__)

    def _one_line(self, text: str) -> str:
        return one_line(text, hide=self._secrets)


class SharedConnection(Generic[C]):
    """A connection that is opened when it is needed, and replaced when the next send finds it closed.

    Concurrent sends share one attempt to open it, so that an unavailable broker costs each of them one time limit, and
    not one after another. It never reconnects by itself: data that a client has buffered for a lost connection must not
    be sent after the send was reported as failed.
    """

    def __init__(self, connect: Callable[[], Awaitable[C]], is_open: Callable[[C], bool]) -> None:
        self._connect = connect
        self._is_open = is_open
        self._opening: asyncio.Future[C] | None = None

    async def get(self) -> C:
        """Return the open connection. Raises the error of opening it."""
        opening = self._opening
        if opening is not None and opening.done():
            connection = _result_of(opening)
            if connection is not None and self._is_open(connection):
                return connection
            opening = None
        if opening is None:
            opening = self._opening = asyncio.ensure_future(self._connect())
            # If all waiting callers were cancelled, nothing else retrieves the error.
            opening.add_done_callback(_result_of)
        # A cancelled caller leaves the attempt to the others.
        return await asyncio.shield(opening)

    async def take(self) -> C | None:
        """Return the connection, if one is open, to be closed by the caller."""
        opening, self._opening = self._opening, None
        if opening is None:
            return None
        if not opening.done():
            opening.cancel()
            await asyncio.wait([opening])
        return _result_of(opening)


def _result_of(opening: asyncio.Future[C]) -> C | None:
    return None if opening.cancelled() or opening.exception() is not None else opening.result()
