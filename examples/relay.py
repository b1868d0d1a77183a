"""The queue of an SMTP server: it accepts a mail once the database has it, and workers relay it to each recipient.

    export PGOUTBOX_SMTP_HOST=smtp.example.org PGOUTBOX_SMTP_SENDER=postmaster@example.org  # The next hop.
    python -m examples.relay 8025
    pgoutbox worker --app examples.relay:outbox

    curl smtp://127.0.0.1:8025 --upload-file mail.eml --crlf --mail-from ann@example.org \\
        --mail-rcpt bob@example.org --mail-rcpt cid@example.org

    pgoutbox list --destination mailto:bob@example.org        # The state of one recipient.
    pgoutbox reschedule --destination mailto:bob@example.org  # Try again now, or with --at 2h.
    pgoutbox cancel --destination mailto:bob@example.org

The mail is the content of a fan-out, and each recipient is a message: one may be refused and another greylisted. A
refusal sends a bounce. Server and workers may die at any time: a mail that got its 250 is committed, and the client
repeats any other. The size limit is three quarters of PGOUTBOX_MAX_PAYLOAD_BYTES. The server listens on this machine
only, because it relays for everyone.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import sys
from urllib.parse import quote

import psycopg
from aiosmtpd.smtp import SMTP, Envelope, Session
from pydantic import BaseModel

from pgoutbox import Context, Email, Failure, Message, Outbox, RawEmail, RetryPolicy, Skip, Topic

HOST = "127.0.0.1"

logger = logging.getLogger("relay")
outbox = Outbox()


class Accepted(BaseModel):
    """The envelope sender of a mail, empty for a bounce, and the headers, which a bounce quotes."""

    sender: str
    headers: str


# The last recipient is given up after five days.
RELAY: Topic[Accepted] = Topic(
    "relay", payload=Accepted, retry=RetryPolicy.steps(300, 900, 3600, 4 * 3600, max_attempts=33)
)


class Receiver:
    """Answers the commands of SMTP clients."""

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: ARG002, N802
        """Commit the mail with all recipients, and only then accept it."""
        data = envelope.original_content or b""
        sender = envelope.mail_from or ""
        async with await psycopg.AsyncConnection.connect(os.environ["PGOUTBOX_DSN"]) as connection:
            await accept(connection, "" if sender == "<>" else sender, envelope.rcpt_tos, data)
        return "250 2.0.0 accepted"

    async def handle_exception(self, error: Exception) -> str:
        """Let the client repeat the mail. By default aiosmtpd answers 500, and the client gives up."""
        logger.error("the mail was not accepted", exc_info=error)
        return "451 4.3.0 try again later"


async def accept(connection: psycopg.AsyncConnection, sender: str, recipients: list[str], data: bytes) -> None:
    """Enqueue the mail for each recipient, in the caller's transaction."""
    head = data.partition(b"\r\n\r\n")[0][:4000].replace(b"\0", b"")
    await outbox.on(connection).enqueue_fanout(
        RELAY,
        Accepted(sender=sender, headers=head.decode("ascii", "replace")),
        [f"mailto:{quote(recipient, safe='@+=')}" for recipient in dict.fromkeys(recipients)],
        content=base64.b64encode(data).decode(),
    )


@outbox.handler(RELAY)
async def relay(message: Message[Accepted], ctx: Context) -> RawEmail:
    """Hand the bytes on, to the one recipient in the message's destination."""
    await ctx.ensure_lease()
    return RawEmail(data=base64.b64decode(str(message.content)), envelope_sender=message.payload.sender)


@outbox.on_failed(RELAY)
async def bounce(message: Message[Failure], ctx: Context) -> Email:
    """Tell the sender. The transaction that failed the message has enqueued this one."""
    failure = message.payload
    mail = Accepted.model_validate(failure.payload)
    if not mail.sender:
        raise Skip("there is no envelope sender who could get a bounce")
    await ctx.ensure_lease()
    return Email(
        to=mail.sender,
        envelope_sender="",  # A bounce gets no bounce.
        subject="Your mail was not delivered",
        text=f"To: {failure.destination}\nError: {failure.error}\n\nThe headers of your mail:\n\n{mail.headers}",
        headers={"Auto-Submitted": "auto-replied"},
    )


async def main(port: int) -> None:
    """Serve SMTP until the process ends."""
    loop = asyncio.get_running_loop()
    size_limit = outbox.settings.max_payload_bytes // 4 * 3 - 3  # The content is base64 in quotes.
    receiver = Receiver()
    server = await loop.create_server(
        lambda: SMTP(receiver, loop=loop, hostname="localhost", data_size_limit=size_limit), HOST, port
    )
    print(f"listening on {HOST}:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
