"""Real brokers as processes of the tests' own, on free ports and in temporary directories.

A broker can be stopped and started again on the same port, or frozen, so that it takes bytes and answers nothing.
They run under the account `nobody` where the tests run as root, and lose what they have when they are stopped, unless
they are told to keep it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pgoutbox import Context, Event, Message, Outbox, Permanent, RetryPolicy, Transient
from tests.conftest import server_missing
from tests.outbox_actions import settings_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pgoutbox.message import Outcome

HOST = "127.0.0.1"
START_SECONDS = 60.0


class Broker:
    """One server and its directory. `answers` tells whether it serves."""

    def __init__(
        self,
        command: Sequence[str],
        home: Path,
        port: int,
        *,
        answers: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port
        self.home = home
        self._command = command
        self._answers = answers
        self._environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers."""
        account = pwd.getpwnam("nobody") if os.getuid() == 0 else None
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                env=self._environment,
                start_new_session=True,
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self._command[0]} did not start: {(self.home / 'log').read_text()[-2_000:]}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill the server and what it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """For a while the server does not run: the kernel takes what is sent to it, and nobody answers."""
        assert self._process is not None
        group = self._process.pid
        os.killpg(group, signal.SIGSTOP)
        os.waitpid(group, os.WUNTRACED)  # Its threads stop one after another.
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)


@contextlib.contextmanager
def own_home(name: str) -> Iterator[Path]:
    """A directory that belongs to the account of the servers."""
    with tempfile.TemporaryDirectory(prefix=f"pgoutbox-{name}-", ignore_cleanup_errors=True) as directory:
        home = Path(directory)
        if os.getuid() == 0:
            account = pwd.getpwnam("nobody")
            os.chown(home, account.pw_uid, account.pw_gid)
        yield home


def program_of(name: str) -> str:
    """The path of a server's program; without it the test is skipped."""
    program = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib/rabbitmq/bin")
    if program is None:
        server_missing(f"no {name}")
    return program


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def accepts(port: int) -> bool:
    """Whether somebody listens."""
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[Broker]:
    """A Redis that keeps its streams over a restart."""
    program, port = program_of("redis-server"), free_port()
    with own_home("redis") as home:
        command = [
            program, "--port", str(port), "--bind", HOST, "--dir", str(home), "--appendonly", "yes",
            "--appendfsync", "always", "--save", "", *options,
        ]  # fmt: skip
        broker = Broker(command, home, port, answers=lambda: accepts(port))
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()


def outbox_with(dsn: str, **settings: object) -> Outbox:
    """An outbox whose topic `greet` hands its payload to the broker, and is tried again much later."""
    outbox = Outbox(settings_for(dsn, event_source="https://club.example.org", broker_timeout_seconds=2, **settings))

    @outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
    async def greet(message: Message, ctx: Context) -> Event:
        return Event(message.payload)

    return outbox


def error_of(outcome: Outcome, kind: type[Transient | Permanent]) -> str:
    """The error of an outcome that has to be of this kind."""
    assert isinstance(outcome, kind), outcome
    return outcome.error


@contextlib.contextmanager
def nats_server(configuration: str = "") -> Iterator[Broker]:
    """A NATS with JetStream, which keeps its streams over a restart."""
    program, port = program_of("nats-server"), free_port()
    with own_home("nats") as home:
        path = home / "nats.conf"
        path.write_text(f'listen: "{HOST}:{port}"\njetstream {{ store_dir: "{home}/jetstream" }}\n{configuration}')
        broker = Broker([program, "--config", str(path)], home, port, answers=lambda: _greets(port))
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()


def _greets(port: int) -> bool:
    """Whether a NATS listens; it accepts connections a moment before it does."""
    try:
        with socket.create_connection((HOST, port), timeout=1) as client:
            return client.recv(4) == b"INFO"
    except OSError:
        return False
