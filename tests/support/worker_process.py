"""`pgoutbox worker` as a process of a test: configured only by the test, with its log in a file, and killed when the
test ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.forks import LIBRARIES, Fork, forks
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import psycopg

_READ_AT_START: Final = frozenset({"LD_PRELOAD", "PYTHONSAFEPATH"})


def worker_command(app: str, *arguments: str) -> list[str]:
    """Return the arguments of Python for a worker with the handlers of `app`."""
    return ["-m", "pgoutbox", "worker", "--app", app, *arguments]


def environment_with(**settings: str) -> dict[str, str]:
    """Return this process's environment with only these settings of pgoutbox, a JSON log and a lease that is short
    enough to await."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PGOUTBOX_")}
    told = {"lease_seconds": "2", "log_format": "json", "maintenance_interval_seconds": "0"} | settings
    return inherited | {f"PGOUTBOX_{name.upper()}": value for name, value in told.items()}


def connection_count(db: psycopg.Connection) -> int:
    """Count the connections of workers to this database.

    They end after their process, whoever its parent was. The server still executes statements that a killed process
    had sent, above all a claim. A test that ages the leases of dead workers must first wait until their connections
    are gone, because that claim could still take messages.
    """
    ((count,),) = db.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'"
    ).fetchall()
    return int(count)


def is_asleep(db: psycopg.Connection, worker: WorkerProcess) -> bool:
    """Return whether the last statement of this worker asked when the next message falls due."""
    row = db.execute(
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle' "
        "AND application_name LIKE 'pgoutbox claim %%:' || %s || ':%%' AND query LIKE '%%due.first_at%%'",
        [worker.pid],
    ).fetchone()
    return row is not None


class WorkerProcess:
    """A worker with the handlers of `app`, behind the command `prefix` if one is given.

    It forks from a process that has imported pgoutbox, unless it has a prefix, or variables that only a new interpreter
    reads. The caller must call `end`. Several workers may append to one log.
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
        command = worker_command(app, *arguments)
        given = environment_with(**settings) | dict(environment or {})
        self._process: Fork | subprocess.Popen[bytes]
        with log.open("a") as output:
            if prefix or _READ_AT_START.intersection(environment or ()):
                whole = [*prefix, sys.executable, *command]
                self._process = subprocess.Popen(whole, env=given, stderr=output, start_new_session=True)
            else:
                streams = (0, 1, output.fileno())
                self._process = forks(*LIBRARIES).start(command, cwd=Path.cwd(), env=given, streams=streams)
        self.pid: Final = self._process.pid

    @property
    def log(self) -> str:
        """Return its standard error output."""
        return self._log.read_text()

    @property
    def has_ended(self) -> bool:
        """Return whether the process is gone."""
        return self._process.poll() is not None

    def events(self, *levels: str) -> list[str]:
        """Return the events in its log, of these levels or of all. Lines that are not events are returned as text."""
        found = []
        for line in self.log.splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # The line is still being written.
            try:
                record = json.loads(line)
            except ValueError:
                found.append(line)
                continue
            if not levels or record["level"] in levels:
                found.append(record.get("event") or line)
        return found

    def records(self, event: str) -> list[dict[str, object]]:
        """Return the records of an event in its log."""
        lines = [line for line in self.log.splitlines(keepends=True) if line.startswith("{") and line.endswith("}\n")]
        return [record for line in lines if (record := json.loads(line)).get("event") == event]

    def cpu_seconds(self) -> float:
        """Return its CPU time."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self, timeout: float = PROCESS_PATIENCE_SECONDS) -> int:
        """Wait until it ends, and return its exit code."""
        return self._process.wait(timeout)

    def until_suspended(self) -> None:
        """Wait until a signal has stopped all its threads."""
        wait_until(
            lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] == "T",
            lambda: f"the worker is suspended\n{self.log}",
        )

    def send_signal(self, number: int) -> None:
        """Send it a signal if it still runs."""
        self._process.send_signal(number)

    def terminate(self) -> None:
        """Tell it to stop."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, but not its children."""
        self.send_signal(signal.SIGKILL)

    def stop(self) -> int:
        """Tell it to stop, and return its exit code. Zero means that it received the signal."""
        self.terminate()
        return self.wait()

    def end(self) -> None:
        """Kill it with its children, and wait until it is gone."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()
        for pid in self._children():
            # Each child has its own session. The process number of an ended child may belong to another process now.
            with contextlib.suppress(OSError):
                if self._app.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def _children(self) -> list[int]:
        records = [json.loads(line) for line in self.log.splitlines() if line.startswith("{") and line.endswith("}")]
        return [record["pid"] for record in records if record.get("event") == "process_started"]
