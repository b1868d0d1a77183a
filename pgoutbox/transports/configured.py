"""Which transports there are without anybody making one: those whose settings name a server, and the web's.

What each needs is imported when it is asked for, so that a worker without Kafka's settings needs no Kafka client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pgoutbox.settings import Settings
from pgoutbox.transports import Transport

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
    """What makes the transport of a scheme appear, as the end of a sentence that says it is missing."""
    return _HINTS.get(scheme, "")


def complete(given: Mapping[str, Transport], settings: Settings) -> dict[str, Transport]:
    """The transports by scheme: those given, and for other schemes those that the settings configure.

    Raises `MissingExtraError` where the settings name what is not installed.
    """
    transports = dict(given)
    if "mailto" not in transports and settings.smtp_host is not None:
        from pgoutbox.transports.smtp import SmtpTransport

        transports["mailto"] = SmtpTransport(settings)
    if "apprise" not in transports and settings.apprise_urls is not None:
        from pgoutbox.transports.apprise import AppriseTransport

        transports["apprise"] = AppriseTransport(settings)
    if "https" not in transports:
        from pgoutbox.transports.webhook import WebhookTransport, is_installed

        # Who set secrets means to send webhooks: a missing extra must not go unnoticed then.
        if is_installed() or settings.webhook_secrets is not None:
            webhook = WebhookTransport(settings)
            transports = dict.fromkeys(webhook.schemes, webhook) | transports
    if "redis" not in transports and settings.redis_url is not None:
        from pgoutbox.transports.redis_streams import RedisTransport

        transports["redis"] = RedisTransport(settings)
    if "nats" not in transports and settings.nats_url is not None:
        from pgoutbox.transports.nats_jetstream import NatsTransport

        transports["nats"] = NatsTransport(settings)
    if "rabbitmq" not in transports and settings.rabbitmq_url is not None:
        from pgoutbox.transports.rabbitmq import RabbitMQTransport

        transports["rabbitmq"] = RabbitMQTransport(settings)
    if "kafka" not in transports and settings.kafka_servers is not None:
        from pgoutbox.transports.kafka import KafkaTransport

        transports["kafka"] = KafkaTransport(settings)
    return transports
