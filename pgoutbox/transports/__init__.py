"""The seam between a handler that renders and the transport that sends.

A handler returns a content (an `Email`, say). The transport registered for the scheme of the message's destination, or
for the content's own scheme where the message names no destination, sends it and classifies the answer as an outcome.
A transport never raises for what the receiver said: it returns `Transient` or `Permanent`. Where the destination or the
way to it is at fault, and not the one message, it says so: `Transient(..., outage=True)`, or `Unavailable` where a
setting, an account or a sender has to be repaired before anything can be handed over.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

from pgoutbox.message import Message, Outcome


@runtime_checkable
class Content(Protocol):
    """Something a handler returns to be sent. `scheme` names the transport when the message has no destination."""

    @property
    def scheme(self) -> str:
        """A URI scheme without the colon: `mailto`, `https` ..."""
        ...


class Transport(Protocol):
    """Sends contents to the destinations of some URI schemes. One instance serves one worker, on its event loop.

    While the setting `redirect_to` is given, contents go only to transports that have an attribute `redirect_to` of
    the same value, and thereby promise to hand nothing over to anybody else than the redirect says.
    """

    @property
    def schemes(self) -> tuple[str, ...]:
        """The URI schemes it serves, lower case, without the colon."""
        ...

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the content over once and say how it went.

        The hand-over carries `message.idempotency_key`, so that the receiver can recognise a repetition. A content or
        destination of the wrong form is `Permanent`, naming the field; cancellation passes through.
        """
        ...

    async def aclose(self) -> None:
        """Close what is open. Called once, when no send is under way."""
        ...


@runtime_checkable
class NamesBreaker(Protocol):
    """A transport that says itself what its circuit breakers stand for; it need not."""

    def breaker_key(self, message: Message[object], content: Content | None) -> str | None:
        """What this delivery depends on: `smtp:mail.example.org:587` for all, or one name per host. Holds no secret.

        Asked before the handler runs, too, and then without a content: None means that nothing can be said yet, and
        that nothing is held back if the content does not change that.
        """
        ...


@runtime_checkable
class NamesPart(Protocol):
    """A transport of which a part can be out of order while the rest works; it need not have one."""

    def part_key(self, message: Message[object], content: Content) -> str | None:
        """The part that this delivery depends on, such as the sender at a mail server: a breaker beside that of all.

        It opens only when `send` returns `Unavailable(..., breaker=...)` with this key. Holds no secret.
        """
        ...


@runtime_checkable
class ChecksItself(Protocol):
    """A transport that `pgoutbox doctor` can try; it need not."""

    async def check(self) -> str | None:
        """Open what a send needs, hand nothing over, and say what is wrong, in one line without a secret.

        None when nothing is. Nobody sends meanwhile, and `aclose` follows.
        """
        ...


def breaker_key(transport: Transport, message: Message[object], content: Content | None) -> str | None:
    """The transport's own answer, or else `https:api.example.org:443` for a web address and the scheme for the rest.

    The rest may hold tokens where a web address has its host.
    """
    if isinstance(transport, NamesBreaker):
        return transport.breaker_key(message, content)
    if message.destination is None:
        return None if content is None else content.scheme
    return breaker_key_of(message.destination)


def part_key(transport: Transport, message: Message[object], content: Content) -> str | None:
    """The transport's own answer; None for one that has no parts."""
    return transport.part_key(message, content) if isinstance(transport, NamesPart) else None


def breaker_key_of(destination: str) -> str | None:
    """`https:api.example.org:443` for a web address, the scheme for the rest; None for what is neither."""
    scheme = scheme_of(destination)
    if scheme not in _WEB_PORTS:
        return scheme or None
    try:
        parts = urlsplit(destination)
        return f"{scheme}:{parts.hostname}:{parts.port or _WEB_PORTS[scheme]}"
    except ValueError:
        return None  # The transport will say what is wrong with it.


_WEB_PORTS = {"http": 80, "https": 443}


def scheme_of(destination: str) -> str:
    """The scheme of a destination URI, lower case: `mailto:a@b` gives `mailto`; empty when there is none."""
    scheme, colon, _ = destination.partition(":")
    return scheme.lower() if colon else ""
