"""A slow SMTP server that records in the ledger when each e-mail began and was handed over. No fault hits it.

python -m tests.soak.postbox PORT
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiosmtpd.smtp import SMTP, Envelope, Session

from tests.support.dialogues import HOST
from tests.support.ledger import KEY, LEDGER_VARIABLE

if TYPE_CHECKING:
    from pgoutbox import Message

MAIL_SECONDS: Final = 0.25
"""The time that one e-mail takes, so that others wait inside the transport."""
_ATTEMPT: Final = "X-Soak-Attempt"


def headers_of(message: Message[Any]) -> dict[str, str]:
    """Return headers that name the attempt and its process."""
    return {_ATTEMPT: json.dumps([message.payload[KEY], message.attempt_count, f"{os.getpid()}-mail"])}


class Postbox:
    """Handles the dialogues."""

    def __init__(self, ledger: Path) -> None:
        self._fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

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
        key, attempt_count, process = json.loads(message_from_bytes(envelope.original_content or b"")[_ATTEMPT])
        times = (("began", session.began_at), ("handed_over", time.time()), ("ended", time.time()))  # type: ignore[attr-defined]
        records = (
            {"entry": entry, "keys": [key], "at": at, "attempt_count": attempt_count, "process": process}
            for entry, at in times
        )
        os.write(self._fd, b"".join(b"\n" + json.dumps(record).encode() for record in records))
        return "250 2.0.0 taken"


async def main(port: int) -> None:
    """Serve until killed."""
    postbox = Postbox(Path(os.environ[LEDGER_VARIABLE]))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(postbox, hostname="mx.test", loop=loop), HOST, port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
