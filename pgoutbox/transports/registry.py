"""The automatic transports: those whose settings name a server, and the one for webhooks.

The client library of each is imported when needed, so that a worker without Kafka's settings needs no Kafka client. An
unconfigured transport is a `MissingTransport`, so that its messages wait like those of a dead receiver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from operator import attrgetter
from typing import Final, NamedTuple, cast

from pgoutbox import transports as classes
from pgoutbox.message import Message, Outcome, Unavailable
from pgoutbox.settings import Settings, variable_of
from pgoutbox.transports import Content, Transport


class _Automatic(NamedTuple):
    """A transport that the settings configure: its class, the setting that it needs, and another way to it."""

    kind: str
    setting: str = ""
    way: str = ""

    @property
    def hint(self) -> str:
        """How to configure it."""
        return self.way or f"set {variable_of(self.setting)}"


_AUTOMATIC: Final[Mapping[str, _Automatic]] = {
    "mailto": _Automatic("SmtpTransport", "smtp.host", "set PGOUTBOX_SMTP_HOST or PGOUTBOX_SENDMAIL"),
    "apprise": _Automatic("AppriseTransport", "apprise_urls"),
    "https": _Automatic("WebhookTransport", way="pip install 'pgoutbox[webhook]'"),
    "http": _Automatic("WebhookTransport", "webhook.allow_http", "use https, or set PGOUTBOX_WEBHOOK_ALLOW_HTTP"),
    "redis": _Automatic("RedisTransport", "redis.url"),
    "nats": _Automatic("NatsTransport", "nats.url"),
    "rabbitmq": _Automatic("RabbitMQTransport", "rabbitmq.url"),
    "kafka": _Automatic("KafkaTransport", "kafka.servers"),
}


def is_configured(scheme: str, settings: Settings) -> bool:
    """Whether a worker with these settings has a transport of its own for the scheme."""
    match scheme:
        case "mailto":
            return settings.smtp.host is not None or settings.sendmail is not None or settings.mail.transport == "log"
        case "https" | "http":
            return find_spec("h11") is not None and (scheme == "https" or settings.webhook.allow_http)
        case _:
            return scheme in _AUTOMATIC and attrgetter(_AUTOMATIC[scheme].setting)(settings) is not None


def need_of(scheme: str) -> tuple[str, str] | None:
    """Return what the transport of a scheme needs, and the problem without it; None without such a transport."""
    if scheme not in _AUTOMATIC:
        return None
    setting = _AUTOMATIC[scheme].setting if scheme != "http" or find_spec("h11") else ""
    return (variable_of(setting), "is not set") if setting else ("pgoutbox[webhook]", "is not installed")


def build(scheme: str, settings: Settings) -> Transport:
    """Return the automatic transport of a scheme.

    Raises `MissingExtraError` if its extra is not installed, and `ConfigurationError` if a setting is unusable.
    """
    if scheme == "mailto" and settings.mail.transport == "log":
        from pgoutbox.transports.smtp.log import LogTransport

        return LogTransport(settings)
    kind = "SendmailTransport" if scheme == "mailto" and settings.sendmail is not None else _AUTOMATIC[scheme].kind
    return cast("Transport", getattr(classes, kind)(settings))


def complete(given: Mapping[str, Transport], settings: Settings) -> dict[str, Transport]:
    """Return the transports by scheme: the given ones, and for other schemes the ones that the settings configure.

    While `mail.transport` is `log`, no given transport gets e-mail. Raises the errors of `build`.
    """
    transports = dict(given)
    if settings.mail.transport == "log":
        transports["mailto"] = build("mailto", settings)
    for scheme in _AUTOMATIC:
        if scheme == "http" or scheme in transports:
            continue  # The transport for https serves http too.
        # With secrets in the settings, the application sends webhooks: report a missing extra.
        if is_configured(scheme, settings) or (scheme == "https" and settings.webhook.secrets is not None):
            transport = build(scheme, settings)
            transports = dict.fromkeys(transport.schemes, transport) | transports
    return transports


def hint_for(scheme: str) -> str:
    """Return how to configure the transport of a scheme; empty without such a transport."""
    return _AUTOMATIC[scheme].hint if scheme in _AUTOMATIC else ""


class MissingTransport:
    """Replaces the transport of a scheme for which the worker has none. It hands nothing over.

    Settings or another release of the application add the transport. Messages with a misspelt scheme wait until an
    operator cancels them.
    """

    def __init__(self, scheme: str, known: Iterable[str] = ()) -> None:
        self.schemes = (scheme,)
        self._known = known

    def breaker_key(self, message: Message[object], content: Content | None) -> str:  # noqa: ARG002 - one for all
        """Return a key for each scheme: `mailto:no-transport`."""
        return missing_key(self.schemes[0])

    async def send(self, message: Message[object], content: Content) -> Outcome:  # noqa: ARG002 - nothing is sent
        """Return `Unavailable`, with the schemes of the worker's transports."""
        scheme, known = self.schemes[0], ", ".join(sorted(self._known)) or "none"
        hint = f"; {hint}" if (hint := hint_for(scheme)) else ""
        return Unavailable(f"this worker has no transport for the scheme {scheme!r} (it has: {known}){hint}")

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


def missing_key(scheme: str) -> str:
    """Return the key of the breaker that workers without a transport for this scheme open."""
    return f"{scheme}:no-transport"
