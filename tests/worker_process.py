"""`pgoutbox worker` as a process of a test: told nothing but what the test says, with its log in a file, and killed
when the test ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.waiting import PROCESS_PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import psycopg


def worker_command(app: str, *arguments: str) -> list[str]:
    """The command of a worker with the handlers of `app`."""
    return [sys.executable, "-m", "pgoutbox", "worker", "--app", app, *arguments]


def environment_with(**settings: str) -> dict[str, str]:
    """This process's environment with these settings of pgoutbox and no others, but for JSON in the log and a lease
    that can be waited for."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PGOUTBOX_")}
    told = {"lease_seconds": "2", "log_format": "json", "maintenance_interval_seconds": "0"} | settings
    return inherited | {f"PGOUTBOX_{name.upper()}": value for name, value in told.items()}


def connection_count(db: psycopg.Connection) -> int:
    """How many connections workers have to this database. They end after their process, whoever its parent was.

    What a killed process had sent is executed all the same, as soon as the server comes to it: a claim, above all. Who
    ages the leases of the dead waits until nothing is left of them, or that claim may take what it finds.
    """
    ((count,),) = db.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'"
    ).fetchall()
    return int(count)


class WorkerProcess(subprocess.Popen[bytes]):
    """A worker with the handlers of `app`, behind the command `prefix` if there is one. Whoever starts it calls `end`.

    Several may append to one log.
    """

    def __init__(
        self,
        app: str,
        *arguments: str,
        log: Path,
        settings: Mapping[str, str],
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._log = log
        with log.open("ab") as output:
            super().__init__(
                [*prefix, *worker_command(app, *arguments)],
                env=environment_with(**settings) | dict(environment or {}),
                stderr=output,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it has written to its standard error."""
        return self._log.read_text()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.poll() is not None

    def events(self, *levels: str) -> list[str]:
        """The events in its log, of these levels or of all; what is no event is given as it stands."""
        found = []
        for line in self.log.splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # It is being written.
            try:
                record = json.loads(line)
            except ValueError:
                found.append(line)
                continue
            if not levels or record["level"] in levels:
                found.append(record.get("event") or line)
        return found

    def cpu_seconds(self) -> float:
        """How long it has used a processor."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self, timeout: float | None = PROCESS_PATIENCE_SECONDS) -> int:
        """Its exit code, when it has ended."""
        return super().wait(timeout)

    def stop(self) -> int:
        """Tell it to stop; its exit code. Zero means that it was alive to hear it."""
        self.terminate()
        return self.wait()

    def end(self) -> None:
        """Kill it with its children, and wait until it is gone."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()
        for pid in self._children():
            # Each has a session of its own. One that has ended may have left its number to a stranger.
            with contextlib.suppress(OSError):
                if self._app.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def _children(self) -> list[int]:
        records = [json.loads(line) for line in self.log.splitlines() if line.startswith("{") and line.endswith("}")]
        return [record["pid"] for record in records if record.get("event") == "process_started"]
