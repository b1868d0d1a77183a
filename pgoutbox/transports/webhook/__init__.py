"""Webhooks: signed HTTP requests, never to an address that is not public."""

from pgoutbox.transports.webhook.request import Webhook
from pgoutbox.transports.webhook.transport import WebhookTransport

__all__ = ["Webhook", "WebhookTransport"]
