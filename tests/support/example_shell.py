"""A shell in the checkout for tests of the programs in examples/, and the results that they read."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg

from tests.support.forks import run_command
from tests.support.smtp_server import parsed

if TYPE_CHECKING:
    from tests.support.smtp_server import Inbox

ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs commands in the checkout, like a reader."""

    environment: dict[str, str]

    async def run(self, *command: str, code: int = 0) -> str:
        """Return the command's output. If it ends with another exit code, fail with its complete output."""
        done = await asyncio.to_thread(run_command, *command, cwd=ROOT, env=self.environment, merged=True)
        assert done.returncode == code, done.stdout
        return done.stdout

    async def example(self, name: str, *arguments: str) -> list[str]:
        """Run an example and return its output."""
        return (await self.run("-m", f"examples.{name}", *arguments)).splitlines()

    async def deliver(self, name: str, *options: str) -> None:
        """Run a worker with the example's handlers until no message is due."""
        await self.pgoutbox("worker", "--app", f"examples.{name}:outbox", "--once", *options)

    async def pgoutbox(self, *arguments: str, code: int = 0) -> str:
        """Run a command of pgoutbox and return its output."""
        return await self.run("-m", "pgoutbox", *arguments, code=code)


def mails(inbox: Inbox) -> list[tuple[str, str]]:
    """Return recipient and text of each e-mail that the server received."""
    found: list[tuple[str, str]] = []
    for received in inbox.received:
        body = parsed(received.content).get_body()
        assert body is not None
        found += [(recipient, body.get_content().strip()) for recipient in received.recipients]
    return found


def states(dsn: str) -> Counter[str]:
    """Count the messages by state."""
    with psycopg.connect(dsn) as connection:
        return Counter(state for (state,) in connection.execute("SELECT state FROM pgoutbox.message"))
