"""The processes of a run: workers, producers and the host of a destination, restarted whenever they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from tests.soak.app import LONELY_QUEUE, STEADY_QUEUE
from tests.soak.host import PORT_VARIABLE
from tests.soak.postbox import WEBHOOK_PORT_VARIABLE
from tests.soak.witness import MAX_COOLDOWN_SECONDS
from tests.support import dialogues
from tests.support.ledger import LEDGER_VARIABLE
from tests.support.worker_process import environment_with, worker_command

LEASE_SECONDS: Final = 2.0
POLL_SECONDS: Final = 5.0
STOP_SECONDS: Final = 60.0
LONELY_WORKER: Final = "lonely"
WORKER_ROLE: Final = "soak_worker"
"""The role of every worker. Only workers get this role's defaults."""
QUEUES: Final = [f"--queue={name}" for name in ("default", "bulk", "ordered", "rated", "crowded")]
WEIGHTED: Final = [f"{option}:{weight}" for option, weight in zip(QUEUES, (3, 2, 2, 1, 1), strict=True)]
"""In strict order, a backlog of the first queue would keep all workers from the others."""
WORKERS: Final[dict[str, tuple[list[str], dict[str, str]]]] = {
    "plain": (WEIGHTED, {}),
    "narrow": (QUEUES, {"PGOUTBOX_CONCURRENCY": "3", "PGOUTBOX_BATCH_SIZE": "7"}),
    "supervised": ([*WEIGHTED, "--processes", "2"], {}),
    "polling": (WEIGHTED, {"PGOUTBOX_LISTEN": "false", "PGOUTBOX_POLL_INTERVAL_SECONDS": "0.5"}),
    LONELY_WORKER: ([f"--queue={LONELY_QUEUE}"], {}),
    "steady": ([f"--queue={STEADY_QUEUE}"], {}),
}

REPEATABLE_READ: Final = ("psycopg-async", "sqlalchemy")
"""The drivers whose producers use this isolation level; the others use READ COMMITTED."""


@dataclass(slots=True)
class Process:
    """A process that is restarted whenever it ends."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: IO[bytes]
    starts: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    """Its exit codes, except the last one."""
    running: subprocess.Popen[bytes] | None = None

    def keep_alive(self) -> None:
        """Start it unless it runs."""
        if self.running is None or self.running.poll() is not None:
            if self.running is not None:
                self.ends[self.running.returncode] += 1
            self.running = subprocess.Popen(
                self.command, env=self.environment, stdout=self.log, stderr=self.log, start_new_session=True
            )
            self.starts += 1

    def signal(self, number: int) -> None:
        """Send a signal to it and its children, if it runs."""
        if self.running is not None and self.running.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.running.pid, number)

    @property
    def pids(self) -> list[int]:
        """Return the numbers of its process and of its children."""
        if self.running is None:
            return []
        children = Path(f"/proc/{self.running.pid}/task/{self.running.pid}/children")
        return [self.running.pid, *map(int, children.read_text().split())] if children.exists() else []

    def stop(self, *, seconds: float = STOP_SECONDS) -> None:
        """Tell it to stop, and wait. If it does not stop, kill it and raise an error."""
        if self.running is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.running.send_signal(signal.SIGTERM)
        try:
            self.running.wait(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{self.name} did not stop within {seconds:g} s of SIGTERM") from error
        finally:
            self.signal(signal.SIGKILL)


class Crew:
    """Creates the processes of one run, with their logs and ledger in `directory`."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path) -> None:
        self._stack = stack
        self._directory = directory
        self._port = free_port()
        self._mail_port = free_port()
        self._webhook_port = free_port()
        self._environment = environment_with(
            lease_seconds=str(LEASE_SECONDS),
            poll_interval_seconds=str(POLL_SECONDS),
            maintenance_interval_seconds="1",
            listener_heartbeat_seconds="2",
            listener_heartbeat_timeout_seconds="1",
            shutdown_grace_seconds="1",
            statement_timeout_seconds="5",
            breaker_failures="3",
            breaker_cooldown_seconds="1",
            breaker_max_cooldown_seconds=str(MAX_COOLDOWN_SECONDS),
            breaker_probe_timeout_seconds="5",
            smtp_host=dialogues.HOST,
            smtp_port=str(self._mail_port),
            smtp_security="none",
            smtp_sender="soak@example.org",
            smtp_ehlo_name="soak.example.org",
            smtp_connections="1",
            webhook_allow_http="true",
            webhook_allowed_networks="127.0.0.0/8",
            webhook_ports=str(self._webhook_port),
            webhook_secrets="whsec_c29ha3NvYWtzb2Frc29ha3NvYWtzb2Fr",
        ) | {
            LEDGER_VARIABLE: str(directory / "ledger"),
            PORT_VARIABLE: str(self._port),
            WEBHOOK_PORT_VARIABLE: str(self._webhook_port),
        }

    def worker(self, name: str, dsn: str) -> Process:
        """Return one of `WORKERS`."""
        options, extra = WORKERS[name]
        command = [sys.executable, *worker_command("tests.soak.app:outbox", *options)]
        return self._process(f"worker-{name}", command, dsn, extra)

    def producer(self, driver: str, seed: int, dsn: str) -> Process:
        """Return a producer on this driver, in REPEATABLE READ if it is one of those."""
        isolation = {"PGOPTIONS": "-c default_transaction_isolation=repeatable\\ read"}
        extra = isolation if driver in REPEATABLE_READ else {}
        return self._process(f"producer-{driver}", _module("producer", driver, str(seed)), dsn, extra)

    def host(self) -> Process:
        """Return the destination that can die."""
        return self._process("host", _module("host", str(self._port)), "", {})

    def postbox(self, seed: int) -> Process:
        """Return the slow SMTP server, which also receives webhooks."""
        ports = str(self._mail_port), str(self._webhook_port)
        return self._process("postbox", _module("postbox", *ports, str(seed)), "", {})

    def _process(self, name: str, command: list[str], dsn: str, extra: Mapping[str, str]) -> Process:
        log = self._stack.enter_context((self._directory / f"{name}.log").open("ab"))
        made = Process(name, command, {**self._environment, "PGOUTBOX_DSN": dsn, **extra}, log)
        self._stack.callback(made.signal, signal.SIGKILL)
        return made


@contextlib.contextmanager
def crew_in(directory: Path) -> Iterator[Crew]:
    """Yield a crew, and kill the processes that still run at the end."""
    with contextlib.ExitStack() as stack:
        yield Crew(stack, directory)


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"tests.soak.{name}", *arguments]


def free_port() -> int:
    """Return a port that is currently free."""
    with socket.create_server((dialogues.HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port
