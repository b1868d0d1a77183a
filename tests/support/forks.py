"""Programs in processes that have imported their libraries.

A command spends most of its time on the imports of its libraries. Here one process has imported them, and forks for
each command. The command has its own process, session, directory, variables, arguments and exit, like one that the
shell starts. A test whose promise is the start of a program starts an interpreter instead.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What the commands of pgoutbox import.
LIBRARIES: Final = (
    "alembic.command",
    "pgoutbox.cli.commands",
    "pgoutbox.cli.main",
    "pgoutbox.cli.program",
    "pgoutbox.transports.registry",
    "pgoutbox.worker.supervisor",
)
_PATIENCE_SECONDS: Final = 240.0
_SIZE: Final = 100_000  # of the largest command, with its variables


class Fork:
    """A running command, which leads a session of its own. Its parent is another process."""

    def __init__(self, command: Sequence[str], server: socket.socket) -> None:
        """Control the command whose process and exit are told at this socket."""
        self.returncode: int | None = None
        self._command, self._server = command, server
        self.pid = int(server.recv(_SIZE))

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends, and return its exit code. Raise TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                self.returncode = int(self._server.recv(_SIZE))
            except TimeoutError:
                raise subprocess.TimeoutExpired(self._command, timeout or 0) from None
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Forks:
    """A process that forks for each command."""

    def __init__(self, modules: Sequence[str], warning: str) -> None:
        """Start the process with these imported modules. Warnings have this effect, as with `-W`."""
        self._directory = tempfile.mkdtemp(prefix="pgoutbox-forks-")
        self._address = f"{self._directory}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-W", warning, __file__, str(listener.fileno()), *modules],
                env=without_settings(os.environ),
                stdin=subprocess.PIPE,  # It ends with its standard input.
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        atexit.register(self._end)

    def start(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], streams: tuple[int, int, int]
    ) -> Fork:
        """Start `python` with these arguments: the path of a program, or `-m` and a module.

        `streams` are the files of its standard input, output and errors. The only variable of Python that it notices is
        PYTHONPATH.
        """
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.connect(self._address)
        request = json.dumps([list(command), str(cwd), dict(env)]).encode()
        socket.send_fds(server, [request], streams)
        return Fork(command, server)

    def run(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], merged: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with an empty standard input. `merged` writes its errors to `stdout` too."""
        with Path(os.devnull).open() as nothing, _file() as out, _file() as err:
            streams = (nothing.fileno(), out.fileno(), (out if merged else err).fileno())
            fork = self.start(command, cwd=cwd, env=env, streams=streams)
            try:
                code = fork.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(fork.pid, signal.SIGKILL)
                raise
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    def script(self, *command: str) -> str:
        """Return the line of a shell script that runs `python` with these arguments and those of the script."""
        client = Path(__file__).with_name("fork_client.py")
        return f'exec {shlex.join([sys.executable, "-IS", str(client), self._address, *command])} "$@"\n'

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._directory)


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", newline="")


@cache
def forks(*modules: str, warning: str = "default") -> Forks:
    """Return the process of this session that has imported these modules."""
    return Forks(modules, warning)


def run_command(
    *command: str, cwd: Path, env: Mapping[str, str], merged: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python` with these arguments, for example `-m pgoutbox list`, in a process that has imported pgoutbox."""
    return forks(*LIBRARIES).run(command, cwd=cwd, env=env, merged=merged)


def without_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set neither pgoutbox nor Django."""
    return {name: value for name, value in variables.items() if not name.startswith(("PGOUTBOX_", "DJANGO_"))}


def _serve(listener: socket.socket) -> tuple[list[str], list[str]]:
    """Fork for each request. Return in the forked process, with its arguments and its path."""
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            listener.close()
            sys.exit()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        client, _ = listener.accept()
        with client:
            if os.fork():
                continue
            listener.close()
            request, streams, _, _ = socket.recv_fds(client, _SIZE, 3)
            if child := os.fork():  # The other commands do not wait for this one.
                for stream in streams:
                    os.close(stream)
                _, status = os.waitpid(child, 0)
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                os._exit(0)
            os.setsid()
            client.sendall(str(os.getpid()).encode())
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        command, directory, variables = json.loads(request)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)
        time.tzset()
        return command, [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]


def _main() -> None:
    _, number, *modules = sys.argv
    del sys.path[0]  # The directory of this file.
    for name in modules:
        import_module(name)
    gc.freeze()
    command, path = _serve(socket.socket(fileno=int(number)))
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[:0] = [str(Path.cwd()), *path]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[:0] = [str(Path(command[0]).resolve().parent), *path]
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    _main()
