"""The automatic transports: those whose settings name a server, and the one for webhooks.

The client library of each is imported when needed, so that a worker without Kafka's settings needs no Kafka client. An
unconfigured transport is a `MissingTransport`, so that its messages wait like those of a dead receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pkgutil import resolve_name
from typing import Final, NamedTuple, cast

from pgoutbox.message import Message, Outcome, Unavailable
from pgoutbox.settings import Settings
from pgoutbox.transports import Content, Transport


class _Automatic(NamedTuple):
    """A transport that the settings configure: its class, whether they do, and the way to it."""

    place: str
    is_configured: Callable[[Settings], bool]
    hint: str


def _has_webhooks() -> bool:
    from pgoutbox.transports.webhook.transport import is_installed

    return is_installed()


_WEBHOOK: Final = "webhook:WebhookTransport"
_LOG: Final = "smtp.log:LogTransport"
_SENDMAIL: Final = "smtp.sendmail:SendmailTransport"
_AUTOMATIC: Final[Mapping[str, _Automatic]] = {
    "mailto": _Automatic(
        "smtp:SmtpTransport",
        lambda s: s.smtp.host is not None or s.sendmail is not None or s.mail.transport == "log",
        "set PGOUTBOX_SMTP_HOST or PGOUTBOX_SENDMAIL",
    ),
    "apprise": _Automatic(
        "apprise:AppriseTransport", lambda s: s.apprise_urls is not None, "set PGOUTBOX_APPRISE_URLS"
    ),
    "https": _Automatic(_WEBHOOK, lambda _: _has_webhooks(), "pip install 'pgoutbox[webhook]'"),
    "http": _Automatic(
        _WEBHOOK,
        lambda s: _has_webhooks() and s.webhook.allow_http,
        "use https, or set PGOUTBOX_WEBHOOK_ALLOW_HTTP",
    ),
    "redis": _Automatic(
        "brokers.redis_streams:RedisTransport", lambda s: s.redis.url is not None, "set PGOUTBOX_REDIS_URL"
    ),
    "nats": _Automatic(
        "brokers.nats_jetstream:NatsTransport", lambda s: s.nats.url is not None, "set PGOUTBOX_NATS_URL"
    ),
    "rabbitmq": _Automatic(
        "brokers.rabbitmq:RabbitMQTransport", lambda s: s.rabbitmq.url is not None, "set PGOUTBOX_RABBITMQ_URL"
    ),
    "kafka": _Automatic(
        "brokers.kafka:KafkaTransport", lambda s: s.kafka.servers is not None, "set PGOUTBOX_KAFKA_SERVERS"
    ),
}


def is_configured(scheme: str, settings: Settings) -> bool:
    """Whether a worker with these settings has a transport of its own for the scheme."""
    return scheme in _AUTOMATIC and _AUTOMATIC[scheme].is_configured(settings)


def build(scheme: str, settings: Settings) -> Transport:
    """Return the automatic transport of a scheme.

    Raises `MissingExtraError` if its extra is not installed, and `ConfigurationError` if a setting is unusable.
    """
    place = _AUTOMATIC[scheme].place
    if scheme == "mailto" and settings.mail.transport == "log":
        place = _LOG
    elif scheme == "mailto" and settings.sendmail is not None:
        place = _SENDMAIL
    kind = resolve_name(f"pgoutbox.transports.{place}")
    return cast("Transport", kind(settings))


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
    """Return how to configure the transport of a scheme, as the end of a sentence about a missing one."""
    return f"; {_AUTOMATIC[scheme].hint}" if scheme in _AUTOMATIC else ""


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
        scheme = self.schemes[0]
        known = ", ".join(sorted(self._known)) or "none"
        return Unavailable(
            f"this worker has no transport for the scheme {scheme!r} (it has: {known}){hint_for(scheme)}"
        )

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


def missing_key(scheme: str) -> str:
    """Return the key of the breaker that workers without a transport for this scheme open."""
    return f"{scheme}:no-transport"
