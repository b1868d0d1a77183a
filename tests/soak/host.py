"""A destination that can die: it answers every line with ok until it is killed. Its transport writes the ledger.

python -m tests.soak.host PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final

from pgoutbox.message import Message, Outcome, Sent
from tests.support.dialogues import HOST
from tests.support.ledger import told_ledger
from tests.support.line_server import LineTransport

if TYPE_CHECKING:
    from pgoutbox.transports import Content

PORT_VARIABLE: Final = "SOAK_HOST_PORT"
"""The environment variable with the host's port."""


class NotedLineTransport(LineTransport):
    """Records a hand-over after the host has confirmed the line. An unconfirmed line may be sent again."""

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the line over."""
        with told_ledger().running(message.payload, message.attempt_count):
            outcome = await super().send(message, content)
            if isinstance(outcome, Sent):
                told_ledger().hand_over(message.payload, message.attempt_count)
            return outcome


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        if await reader.readline():
            writer.write(b"ok\n")
            await writer.drain()
    except ConnectionError:
        pass  # The client was killed, or gave up.
    finally:
        writer.close()


async def main(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.start_server(_answer, HOST, port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
