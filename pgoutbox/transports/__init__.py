"""The interface between a handler that renders and the transport that sends.

A handler returns a content, for example an `Email`. The transport for the scheme of the message's destination sends it
and classifies the answer as an outcome. Without a destination, the content's own scheme selects the transport. A
transport never raises for a receiver's answer: it returns `Transient` or `Permanent`. If the destination or the way to
it is at fault, and not the message, it returns `SendFailure(..., outage=True)`. If a setting, an account or a sender
must be fixed before any hand-over, it returns `Unavailable`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, runtime_checkable
from urllib.parse import urlsplit

from pgoutbox.message import Message, Outcome

if TYPE_CHECKING:
    from pgoutbox.transports.apprise import AppriseTransport
    from pgoutbox.transports.brokers.kafka import KafkaTransport
    from pgoutbox.transports.brokers.nats_jetstream import NatsTransport
    from pgoutbox.transports.brokers.rabbitmq import RabbitMQTransport
    from pgoutbox.transports.brokers.redis_streams import RedisTransport
    from pgoutbox.transports.redirect import Redirect
    from pgoutbox.transports.smtp.mail import render as render_email
    from pgoutbox.transports.smtp.sendmail import SendmailTransport
    from pgoutbox.transports.smtp.transport import SmtpTransport
    from pgoutbox.transports.webhook.request import Rules as WebhookRules
    from pgoutbox.transports.webhook.request import render as render_webhook
    from pgoutbox.transports.webhook.transport import WebhookTransport

__all__ = [
    "AppriseTransport",
    "ChecksItself",
    "Content",
    "FollowsRedirect",
    "KafkaTransport",
    "NamesBreaker",
    "NamesParts",
    "NatsTransport",
    "RabbitMQTransport",
    "RedisTransport",
    "SendmailTransport",
    "SmtpTransport",
    "Transport",
    "WebhookRules",
    "WebhookTransport",
    "pass_gate",
    "render_email",
    "render_webhook",
]

Gate: TypeAlias = "Callable[[], Coroutine[object, object, Redirect | None]]"


async def _no_gate() -> None:
    return None


# Set by the worker for each hand-over.
current_gate: ContextVar[Gate] = ContextVar("current_gate", default=_no_gate)


def pass_gate() -> Coroutine[object, object, Redirect | None]:
    """Ensure that the message is still to be sent: held, neither cancelled nor superseded, and not expired.

    Call it in `Transport.send` after all waiting, for a connection or for a turn, and right before the first byte of
    the hand-over. It raises `Snooze` if the message must not be sent: return it, or let it pass. Usually it asks no
    server. The worker itself calls it before `send`.

    It returns the redirect that is on, for a transport that is `FollowsRedirect`, else None. Outside of a worker it
    lets everything pass.
    """
    return current_gate.get()()


@runtime_checkable
class Content(Protocol):
    """A value that a handler returns to be sent. `scheme` selects the transport if the message has no destination."""

    @property
    def scheme(self) -> str:
        """A URI scheme without the colon: `mailto`, `https` ..."""
        ...


class Transport(Protocol):
    """Sends contents to the destinations of some URI schemes. One instance serves one worker, on its event loop.

    While a redirect is on, contents go only to transports with `follows_redirect`. Other contents are held back.
    """

    @property
    def schemes(self) -> tuple[str, ...]:
        """The URI schemes it serves, lower case, without the colon."""
        ...

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the content over once and return the outcome.

        The hand-over includes `message.idempotency_key`, so that the receiver can recognise a repetition. An invalid
        content or destination is `Permanent`, naming the field. Cancellation passes through. A transport that waits
        calls `pass_gate` after it.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections. Called once, when no send is in progress."""
        ...


class NamesBreaker(Protocol):
    """A transport with its own keys of circuit breakers. Optional."""

    def breaker_key(self, message: Message[object], content: Content | None) -> str | None:
        """Return the breaker's key: `smtp:mail.example.org:587` for all messages, or one name per host. No secrets.

        Also called before the handler runs, without a content. None means that the key is not known. If it is still
        None with the content, no breaker holds the message back.
        """
        ...


class NamesParts(Protocol):
    """A transport of which a part can fail while the rest works. Optional."""

    def part_keys(self, message: Message[object], content: Content) -> Sequence[str]:
        """Return the keys of the parts that this delivery needs, such as the sender: additional breakers.

        Such a breaker opens only when `send` returns `Unavailable` or `SendFailure` with its key as `breaker`. Keys
        contain no secrets.
        """
        ...


class FollowsRedirect(Protocol):
    """A transport that hands over to testers while a redirect is on. Optional.

    Its `send` calls `await pass_gate()` right before the hand-over. It returns the redirect that is on, or None. During
    a blackout, `redirect.refusal(message)` is the outcome to return.
    """

    follows_redirect: bool


@runtime_checkable
class ChecksItself(Protocol):
    """A transport that `pgoutbox doctor` can check. Optional."""

    async def check(self) -> Outcome:
        """Connect as for a send, hand nothing over, and return the outcome that a send would have.

        `Unavailable` and an outage are problems, another failure is a warning. Errors are one line without a secret. No
        send runs meanwhile, and `aclose` follows.
        """
        ...


def breaker_key(transport: Transport, message: Message[object], content: Content | None) -> str | None:
    """Return the transport's own key, else `https:api.example.org:443` for a web address, or another URI's scheme.

    Other URIs may contain tokens in place of a host.
    """
    # `isinstance` with a protocol takes fifty times as long.
    own_key: Callable[[Message[object], Content | None], str | None] | None = getattr(transport, "breaker_key", None)
    if own_key is not None:
        return own_key(message, content)
    if message.destination is None:
        return None if content is None else content.scheme
    return breaker_key_of(message.destination)


def part_keys(transport: Transport, message: Message[object], content: Content) -> Sequence[str]:
    """Return the transport's own keys; none for a transport without parts."""
    own_keys: Callable[[Message[object], Content], Sequence[str]] | None = getattr(transport, "part_keys", None)
    return () if own_keys is None else own_keys(message, content)


@lru_cache(maxsize=1_000)
def breaker_key_of(destination: str) -> str | None:
    """Return `https:api.example.org:443` for a web address, the scheme for other URIs, and None for other texts."""
    scheme = scheme_of(destination)
    if scheme not in WEB_PORTS:
        return scheme or None
    try:
        parts = urlsplit(destination)
        return f"{scheme}:{parts.hostname}:{parts.port or WEB_PORTS[scheme]}"
    except ValueError:
        return None  # The transport reports the problem.


def bare_destination(destination: str) -> str | None:
    """Return the shortest destination with the same hold: `mailto:` or `https://api.example.org/`; None if unclear.

    `pgoutbox._hold_of` is the rule: the scheme, or the scheme, host and port of a web address.
    """
    scheme, colon, _ = destination.partition(":")
    if scheme not in WEB_PORTS:
        return f"{scheme}:" if colon and scheme.lower() not in WEB_PORTS else None
    host = _WEB_HOST.match(destination)
    return None if host is None else f"{scheme}://{host[1]}/"


WEB_PORTS = {"http": 80, "https": 443}
# Any other text after the host may be a part of a query.
_WEB_HOST = re.compile(r"https?://(?:[^/?#@]*@)?([\w.\[\]:-]+)(?:/|$)")


def scheme_of(destination: str) -> str:
    """Return the scheme of a destination URI, lower case: `mailto` for `mailto:a@b`; empty if there is none."""
    scheme, colon, _ = destination.partition(":")
    return scheme.lower() if colon else ""


# Loaded when they are first used: most need an extra.
_PARTS: Final = {
    "AppriseTransport": ("apprise", "AppriseTransport"),
    "KafkaTransport": ("brokers.kafka", "KafkaTransport"),
    "NatsTransport": ("brokers.nats_jetstream", "NatsTransport"),
    "RabbitMQTransport": ("brokers.rabbitmq", "RabbitMQTransport"),
    "RedisTransport": ("brokers.redis_streams", "RedisTransport"),
    "SendmailTransport": ("smtp.sendmail", "SendmailTransport"),
    "SmtpTransport": ("smtp.transport", "SmtpTransport"),
    "WebhookRules": ("webhook.request", "Rules"),
    "WebhookTransport": ("webhook.transport", "WebhookTransport"),
    "render_email": ("smtp.mail", "render"),
    "render_webhook": ("webhook.request", "render"),
}


def __getattr__(name: str) -> object:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PARTS[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)
