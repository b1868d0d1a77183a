"""Programs of examples/ that run until the test ends them: servers, and workers with the handlers of an example."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.example_shell import ROOT
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.example_shell import Shell


@dataclass(frozen=True, slots=True)
class ExampleProcess:
    """A running command of the shell, with its output in a file."""

    process: asyncio.subprocess.Process
    output: Path

    @property
    def lines(self) -> list[str]:
        """Return the complete lines of its output so far."""
        return self.output.read_text().split("\n")[:-1]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for an effect of the process. Fail with its output."""

        def has_come() -> object:
            assert self.process.returncode is None, self.output.read_text()
            return condition()

        await asyncio.to_thread(wait_until, has_come, self.output.read_text)

    async def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), PROCESS_PATIENCE_SECONDS)

    async def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def running(shell: Shell, output: Path, *command: str) -> AsyncIterator[ExampleProcess]:
    """Run `python -m` with this command, and kill it at the end."""
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, cwd=ROOT, env=shell.environment, stdout=file, stderr=subprocess.STDOUT
        )
    example = ExampleProcess(process, output)
    try:
        yield example
    finally:
        await example.kill()
