"""The automatic transports: those whose settings name a server, and the one for webhooks.

The client library of each is imported when needed, so that a worker without Kafka's settings needs no Kafka client. An
unconfigured transport is a `MissingTransport`, so that its messages wait like those of a dead receiver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pgoutbox.message import Message, Outcome, Unavailable
from pgoutbox.settings import Settings
from pgoutbox.transports import Content, Transport

_HINTS: Final = {
    "mailto": "; set PGOUTBOX_SMTP_HOST",
    "apprise": "; set PGOUTBOX_APPRISE_URLS",
    "https": "; pip install 'pgoutbox[webhook]'",
    "http": "; use https, or set PGOUTBOX_WEBHOOK_ALLOW_HTTP",
    "redis": "; set PGOUTBOX_REDIS_URL",
    "nats": "; set PGOUTBOX_NATS_URL",
    "rabbitmq": "; set PGOUTBOX_RABBITMQ_URL",
    "kafka": "; set PGOUTBOX_KAFKA_SERVERS",
}


def hint_for(scheme: str) -> str:
    """Return how to configure the transport of a scheme, as the end of a sentence about a missing one."""
    return _HINTS.get(scheme, "")


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


def complete(given: Mapping[str, Transport], settings: Settings) -> dict[str, Transport]:
    """Return the transports by scheme: the given ones, and for other schemes the ones that the settings configure.

    Raises `MissingExtraError` if the extra of a configured transport is not installed.
    """
    transports = dict(given)
    if "mailto" not in transports and settings.smtp.host is not None:
        from pgoutbox.transports.smtp import SmtpTransport

        transports["mailto"] = SmtpTransport(settings)
    if "apprise" not in transports and settings.apprise_urls is not None:
        from pgoutbox.transports.apprise import AppriseTransport

        transports["apprise"] = AppriseTransport(settings)
    if "https" not in transports:
        from pgoutbox.transports.webhook import WebhookTransport
        from pgoutbox.transports.webhook.transport import is_installed

        # With secrets in the settings, the application sends webhooks: report a missing extra.
        if is_installed() or settings.webhook.secrets is not None:
            webhook = WebhookTransport(settings)
            transports = dict.fromkeys(webhook.schemes, webhook) | transports
    if "redis" not in transports and settings.redis.url is not None:
        from pgoutbox.transports.brokers.redis_streams import RedisTransport

        transports["redis"] = RedisTransport(settings)
    if "nats" not in transports and settings.nats.url is not None:
        from pgoutbox.transports.brokers.nats_jetstream import NatsTransport

        transports["nats"] = NatsTransport(settings)
    if "rabbitmq" not in transports and settings.rabbitmq.url is not None:
        from pgoutbox.transports.brokers.rabbitmq import RabbitMQTransport

        transports["rabbitmq"] = RabbitMQTransport(settings)
    if "kafka" not in transports and settings.kafka.servers is not None:
        from pgoutbox.transports.brokers.kafka import KafkaTransport

        transports["kafka"] = KafkaTransport(settings)
    return transports
