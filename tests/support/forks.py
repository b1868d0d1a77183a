"""Short programs in processes that have imported their libraries.

A short command spends most of its time on the imports of its libraries. Here one process has imported them, and forks
for each command. The command has its own process, directory, variables, arguments and exit, like one that the shell
starts. A test whose promise is the start of a program, or that sends it signals, starts an interpreter instead.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
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
    "pgoutbox.cli.main",
    "pgoutbox.cli.program",
    "pgoutbox.transports.registry",
    "pgoutbox.worker.supervisor",
)
_PATIENCE_SECONDS: Final = 60.0
_SIZE: Final = 100_000  # of the largest command, with its variables


class Forks:
    """A process that forks for each command."""

    def __init__(self, modules: Sequence[str], warning: str) -> None:
        """Start the process with these imported modules. Warnings have this effect, as with `-W`."""
        self._channel, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-W", warning, __file__, str(its_end.fileno()), *modules],
                env=without_settings(os.environ),
                stdin=subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
                start_new_session=True,
            )
        atexit.register(self._end)

    def run(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], merged: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run `python` with these arguments: the path of a program, or `-m` and a module. Its standard input is empty.

        `merged` writes its errors to `stdout` too. The only variable of Python that it notices is PYTHONPATH.
        """
        answer, its_end = socket.socketpair()
        answer.settimeout(_PATIENCE_SECONDS)
        with answer, _file() as out, _file() as err:
            with its_end:
                request = json.dumps([list(command), str(cwd), dict(env)]).encode()
                files = [out.fileno(), (out if merged else err).fileno(), its_end.fileno()]
                socket.send_fds(self._channel, [request], files)
            try:
                code = int(answer.recv(_SIZE))
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                forks.cache_clear()
                raise
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    def _end(self) -> None:
        self._channel.close()
        self._process.wait()


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


def _serve(channel: socket.socket) -> tuple[list[str], list[str]]:
    """Fork for each request. Return in the forked process, with its arguments and its path."""
    while True:
        request, files, _, _ = socket.recv_fds(channel, _SIZE, 3)
        if not request:
            channel.close()
            sys.exit()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork():
            for file in files:
                os.close(file)
            continue
        channel.close()
        *outputs, number = files
        answer = socket.socket(fileno=number)
        if child := os.fork():  # The other commands do not wait for this one.
            _, status = os.waitpid(child, 0)
            answer.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        answer.close()
        for number, file in zip((1, 2), outputs, strict=True):
            os.dup2(file, number)
            os.close(file)
        command, directory, variables = json.loads(request)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)
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
