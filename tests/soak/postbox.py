"""A slow SMTP server, and a receiver of webhooks: they record in the ledger when each one began and was handed over.

No fault hits them. The receiver has whims: it refuses some webhooks, and closes connections without a word.

python -m tests.soak.postbox MAIL_PORT WEBHOOK_PORT SEED
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from email import message_from_bytes
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiosmtpd.smtp import SMTP, Envelope, Session

from tests.support.dialogues import HOST
from tests.support.ledger import KEY, LEDGER_VARIABLE

if TYPE_CHECKING:
    from pgoutbox import Message

WEBHOOK_PORT_VARIABLE: Final = "SOAK_WEBHOOK_PORT"
"""The environment variable with the port of the receiver of webhooks."""
MAIL_SECONDS: Final = 0.25
"""The time that one e-mail takes, so that others wait inside the transport."""
_ATTEMPT: Final = "X-Soak-Attempt"


def headers_of(message: Message[Any]) -> dict[str, str]:
    """Return headers that name the attempt and its process."""
    return {_ATTEMPT: json.dumps([message.payload[KEY], message.attempt_count, f"{os.getpid()}-transport"])}


class Postbox:
    """Handles the dialogues."""

    def __init__(self, ledger: Path, chance: random.Random) -> None:
        self._fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._chance = chance

    async def handle_MAIL(  # noqa: N802 - aiosmtpd
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        """Remember when the e-mail began: the first bytes that cannot be taken back follow."""
        session.began_at = time.time()  # type: ignore[attr-defined]
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 2.1.0 go on"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802 - aiosmtpd
        """Accept the e-mail after a while, and record the attempt."""
        await asyncio.sleep(MAIL_SECONDS)
        self._record(message_from_bytes(envelope.original_content or b"")[_ATTEMPT], session.began_at)  # type: ignore[attr-defined]
        return "250 2.0.0 taken"

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the webhooks of one connection. Record one before its answer, if the answer accepts it."""
        try:
            while True:
                _, _, head = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
                began_at = time.time()
                headers = BytesHeaderParser().parsebytes(head)
                await reader.readexactly(int(headers["Content-Length"]))
                whim = self._chance.choices(["take", "pause", "close after", "refuse", "close"], [80, 5, 9, 3, 3])[0]
                if whim == "close":
                    return
                if whim == "refuse":
                    writer.write(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
                    continue
                if whim == "pause":
                    await asyncio.sleep(MAIL_SECONDS)
                self._record(headers[_ATTEMPT], began_at)
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                await writer.drain()
                if whim == "close after":
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The worker has closed the connection, or was killed.
        finally:
            writer.close()

    def _record(self, attempt: str, began_at: float) -> None:
        key, attempt_count, process = json.loads(attempt)
        times = (("began", began_at), ("handed_over", time.time()), ("ended", time.time()))
        records = (
            {"entry": entry, "keys": [key], "at": at, "attempt_count": attempt_count, "process": process}
            for entry, at in times
        )
        os.write(self._fd, b"".join(b"\n" + json.dumps(record).encode() for record in records))


async def main(mail_port: int, webhook_port: int, seed: int) -> None:
    """Serve until killed."""
    postbox = Postbox(Path(os.environ[LEDGER_VARIABLE]), random.Random(seed))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(postbox, hostname="mx.test", loop=loop), HOST, mail_port)
    async with server, await asyncio.start_server(postbox.receive, HOST, webhook_port):
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
