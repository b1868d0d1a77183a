"""Worker processes to be killed, stopped and lied to, and the ledger outside the database that tells what they did."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

PATIENCE_SECONDS = 60.0
LEDGER_VARIABLE = "FAULTS_LEDGER"
GATE_VARIABLE = "FAULTS_GATE"
SUSPEND_VARIABLE = "FAULTS_SUSPEND"


class HandOver(NamedTuple):
    """One line of the ledger."""

    message_id: int
    attempt_count: int
    pid: int


class Fleet:
    """Starts workers with the handlers of `tests.faults.fleet_app`, and reads their ledger."""

    def __init__(self, dsn: str, directory: Path) -> None:
        self._dsn = dsn
        self.ledger = directory / "ledger"
        self.ledger.touch()
        self.gate = directory / "gate"
        self._log = directory / "log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        *arguments: str,
        prefix: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        **settings: str,
    ) -> subprocess.Popen[bytes]:
        """Start one worker, behind the command `prefix` if there is one; it is killed when the test ends."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PGOUTBOX_")}
        variables |= {"PGOUTBOX_DSN": self._dsn, "PGOUTBOX_LEASE_SECONDS": "2", "PGOUTBOX_LOG_FORMAT": "json"}
        variables |= {LEDGER_VARIABLE: str(self.ledger), GATE_VARIABLE: str(self.gate)}
        variables |= {f"PGOUTBOX_{name.upper()}": value for name, value in settings.items()}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [
                    *prefix,
                    sys.executable,
                    *["-m", "pgoutbox", "worker", "--app", "tests.faults.fleet_app:outbox"],
                    *arguments,
                ],
                env=variables | (environment or {}),
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    @property
    def log(self) -> str:
        """What all of them have logged."""
        return self._log.read_text()

    def hand_overs(self) -> list[HandOver]:
        """The ledger."""
        return [HandOver(*map(int, line.split())) for line in self.ledger.read_text().splitlines()]

    def deliveries(self) -> Counter[int]:
        """How often each message was handed over."""
        return Counter(line.message_id for line in self.hand_overs())

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Return when the condition holds."""
        wait_until(condition, lambda: f"{what}\n{self.log}")

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(PATIENCE_SECONDS)


@contextlib.contextmanager
def fleet_on(dsn: str, directory: Path) -> Iterator[Fleet]:
    """A fleet for the length of the `with` block."""
    fleet = Fleet(dsn, directory)
    try:
        yield fleet
    finally:
        fleet.close()
