"""Text messages to people's numbers, with a transport of your own for an HTTP gateway.

    export SMS_GATEWAY_URL=https://sms.example.org/v1/messages SMS_GATEWAY_KEY=...
    python -m examples.sms +491701234567 +491707654321
    pgoutbox worker --app examples.sms:outbox --once

Replace the request in `SmsTransport.send` by that of your gateway.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
import psycopg

from pgoutbox import Context, Message, Outbox, Permanent, SendFailure, Sent, Unavailable

if TYPE_CHECKING:
    from pgoutbox import Outcome
    from pgoutbox.transports import Content


@dataclass(frozen=True, slots=True)
class Sms:
    """A text message: return it from a handler. The message's destination is the number."""

    text: str = field(repr=False)
    scheme: str = "sms"


class SmsTransport:
    """Sends `Sms` to destinations such as `sms:+491701234567`."""

    schemes = ("sms", "tel")

    def __init__(self, url: str, key: str, *, timeout: float = 10.0) -> None:
        self._url = url
        self._key = key
        self._timeout = timeout
        self._client: httpx.AsyncClient | None = None

    def breaker_key(self, message: Message[object], content: Content | None) -> str:  # noqa: ARG002
        """Return one key for all numbers: if the gateway is down, all messages wait."""
        return f"sms:{httpx.URL(self._url).host}"

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the text to the gateway once."""
        number = (message.destination or "").partition(":")[2]
        if not isinstance(content, Sms) or not re.fullmatch(r"\+[1-9][0-9]{6,14}", number):
            return Permanent("destination: must be an Sms to a number such as sms:+491701234567")
        for name, value in (("SMS_GATEWAY_URL", self._url), ("SMS_GATEWAY_KEY", self._key)):
            if not value:
                return Unavailable(f"{name} is not set")
        self._client = self._client or httpx.AsyncClient(timeout=self._timeout)
        try:
            response = await self._client.post(
                self._url,
                json={"to": number, "text": content.text},
                headers={"Authorization": f"Bearer {self._key}", "Idempotency-Key": message.idempotency_key},
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return SendFailure(f"SMS gateway: {type(error).__name__}", outage=True)
        except httpx.TransportError as error:  # The gateway may have sent the text.
            return SendFailure(f"SMS gateway: {type(error).__name__}", outage=True, unknown=True)
        return outcome_of(response)

    async def aclose(self) -> None:
        """Close the connections. A later send opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def outcome_of(response: httpx.Response) -> Outcome:
    """Return the outcome of the gateway's answer."""
    error = f"SMS gateway: {response.status_code}"
    if response.is_success:
        return Sent()
    if response.status_code in (401, 402, 403):  # The key or the account: no text goes out until it is repaired.
        return Unavailable(error)
    if response.status_code in (408, 429) or response.is_server_error:
        seconds = response.headers.get("Retry-After", "")
        retry_after = float(seconds) if re.fullmatch(r"[0-9]{1,6}", seconds) else None
        return SendFailure(error, retry_after, outage=response.is_server_error)
    return Permanent(error)


outbox = Outbox(transports=[SmsTransport(os.environ.get("SMS_GATEWAY_URL", ""), os.environ.get("SMS_GATEWAY_KEY", ""))])


@outbox.handler("sms.reminder")
async def reminder(message: Message, ctx: Context) -> Sms:  # noqa: ARG001
    """Render the text."""
    return Sms(f"See you at {message.payload['time']}.")


def main(numbers: list[str]) -> None:
    """Enqueue a reminder for each number."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        for number in numbers:
            outbox.on(connection).enqueue("sms.reminder", {"time": "18:30"}, destination=f"sms:{number}")
    print("enqueued", len(numbers))


if __name__ == "__main__":
    main(sys.argv[1:])
