"""E-mail by the HTTP API of a provider, with a transport of your own in place of SMTP.

    export MAIL_PROVIDER_URL=https://api.mail.example.org/v1 MAIL_PROVIDER_KEY=...
    python -m examples.mail_provider ada@example.org
    pgoutbox worker --app examples.mail_provider:outbox --once

This provider takes complete e-mails (MIME). `render_email` makes one with all checks of the SMTP transport, and applies
the redirect for tests. Replace the request in `MailProvider.send` by that of your provider.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from typing import TYPE_CHECKING

import httpx
import psycopg

from pgoutbox import (
    Context,
    Email,
    Message,
    Outbox,
    Permanent,
    RawEmail,
    SendFailure,
    Sent,
    Settings,
    Snooze,
    Unavailable,
)
from pgoutbox.transports import pass_gate, render_email

if TYPE_CHECKING:
    from pgoutbox import Outcome
    from pgoutbox.transports import Content


class MailProvider:
    """Sends `Email` and `RawEmail` by HTTP."""

    schemes = ("mailto",)
    follows_redirect = True

    def __init__(self, settings: Settings, url: str, key: str, *, timeout: float = 30.0) -> None:
        self._settings = settings
        self._url = url
        self._key = key
        self._timeout = timeout
        self._client: httpx.AsyncClient | None = None

    def breaker_key(self, message: Message[object], content: Content | None) -> str:  # noqa: ARG002
        """Return one key for all recipients: if the provider is down, all e-mail waits."""
        return f"mail-provider:{httpx.URL(self._url).host}"

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the e-mail to the provider once. While a redirect is on, its receivers get it."""
        if not isinstance(content, (Email, RawEmail)):
            return Permanent(f"content: must be an Email, not {type(content).__name__}")
        for name, value in (("MAIL_PROVIDER_URL", self._url), ("MAIL_PROVIDER_KEY", self._key)):
            if not value:
                return Unavailable(f"{name} is not set")
        try:
            mail = render_email(content, message, self._settings, await pass_gate())
        except (Permanent, Snooze, Unavailable) as refusal:
            return refusal
        body = {
            "sender": mail.sender,
            "recipients": mail.recipients,
            "mime": base64.b64encode(mail.content).decode(),
        }
        headers = {"Authorization": f"Bearer {self._key}", "Idempotency-Key": message.idempotency_key}
        self._client = self._client or httpx.AsyncClient(timeout=self._timeout)
        try:
            response = await self._client.post(f"{self._url}/send", json=body, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return SendFailure(f"mail provider: {type(error).__name__}", outage=True)
        except httpx.TransportError as error:  # The provider may have sent the e-mail.
            return SendFailure(f"mail provider: {type(error).__name__}", outage=True, unknown=True)
        return outcome_of(response)

    async def check(self) -> Outcome:
        """Let `pgoutbox doctor` try the key. It sends nothing."""
        async with httpx.AsyncClient(timeout=self._timeout) as client:
            response = await client.get(f"{self._url}/account", headers={"Authorization": f"Bearer {self._key}"})
        return Sent() if response.is_success else Unavailable(f"mail provider: {response.status_code}")

    async def aclose(self) -> None:
        """Close the connections. A later send opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def outcome_of(response: httpx.Response) -> Outcome:
    """Return the outcome of the provider's answer."""
    error = f"mail provider: {response.status_code}"
    if response.is_success:
        return Sent()
    if response.status_code in (401, 402, 403):  # The key or the account: no e-mail goes out until it is repaired.
        return Unavailable(error)
    if response.status_code in (408, 429) or response.is_server_error:
        seconds = response.headers.get("Retry-After", "")
        retry_after = float(seconds) if re.fullmatch(r"[0-9]{1,6}", seconds) else None
        return SendFailure(error, retry_after, outage=response.is_server_error)
    return Permanent(error)


settings = Settings()
provider = MailProvider(settings, os.environ.get("MAIL_PROVIDER_URL", ""), os.environ.get("MAIL_PROVIDER_KEY", ""))
outbox = Outbox(settings, transports=[provider])


@outbox.handler("mail.receipt")
async def receipt(message: Message, ctx: Context) -> Email:  # noqa: ARG001
    """Render the e-mail. With a sender of its own, PGOUTBOX_SMTP_SENDER is not needed."""
    return Email(sender="shop@club.test", subject="Your receipt", text=f"Order {message.payload['order_id']}: paid.")


def main(address: str) -> None:
    """Enqueue a receipt."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        outbox.on(connection).enqueue("mail.receipt", {"order_id": 7}, destination=f"mailto:{address}")
    print("enqueued 1")


if __name__ == "__main__":
    main(sys.argv[1])
