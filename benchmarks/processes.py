"""Child processes, each a program of `benchmarks.programs`. They end with the `with` block and with this process.

A child writes lines of JSON to its standard output. The end of its standard input tells it that this process has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from benchmarks.server import libpq_environment

_STOP_SECONDS = 20.0


class ChildError(RuntimeError):
    """A child process ended before it sent its answer."""


class Child:
    """A running program."""

    def __init__(self, program: str, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._program = program
        self._process = process
        self._errors = errors

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def read(self) -> dict[str, object]:
        """Return the next line of the child, or raise `ChildError` with its standard error."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise ChildError(f"{self._program} ended with {code}: {self._errors.read()[-2000:].strip()}")
        document = json.loads(line)
        assert isinstance(document, dict)
        return document

    def lines(self) -> Iterator[dict[str, object]]:
        """Yield all further lines until the child ends. Raise `ChildError` if it fails."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            document = json.loads(line)
            assert isinstance(document, dict)
            yield document
        if self._process.wait() != 0:
            self._errors.seek(0)
            raise ChildError(f"{self._program} ended with {self._process.returncode}: {self._errors.read()[-2000:]}")

    def go(self) -> None:
        """Start a child that waits for the signal."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def interrupt(self) -> None:
        """Ask the child to finish; it may still write."""
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the child, first with SIGTERM."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._errors.close()


def program_command(program: str, *arguments: str) -> list[str]:
    """Return the command that runs a Python program of `benchmarks.programs`."""
    return [sys.executable, "-m", f"benchmarks.programs.{program}", *arguments]


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], *, dsn: str | None, environment: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """Run a program in any language that speaks the same protocol, for the length of the `with` block.

    Without a `dsn` the environment names its databases.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PGOUTBOX_", "PGQUEUER_"))}
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the child object closes it
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**inherited, **({} if dsn is None else {"PGOUTBOX_DSN": dsn}), **(environment or {})},
        # This process handles Ctrl-C, and ends its children itself.
        start_new_session=True,
        text=True,
    )
    started = Child(name, process, errors)
    try:
        yield started
    finally:
        started.stop()


@contextlib.contextmanager
def child(program: str, *arguments: str, dsn: str) -> Iterator[Child]:
    """Run `python -m benchmarks.programs.PROGRAM ARGUMENTS` for the length of the `with` block."""
    with running(program, program_command(program, *arguments), dsn=dsn) as started:
        yield started


def answer_of(program: str, *arguments: str, dsn: str) -> dict[str, object]:
    """Run a program to its end and return the line that it writes."""
    with child(program, *arguments, dsn=dsn) as started:
        return started.read()


def run_tool(command: list[str], *, dsn: str, timeout: float) -> str:
    """Run one of libpq's programs on the database of `dsn` and return its output, including errors."""
    process = subprocess.Popen(
        command,
        env=libpq_environment(dsn),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ChildError(f"{command[0]} ended with {process.returncode}: {output[-2000:].strip()}")
    return output


def wait_until(condition: Callable[[], bool], *, what: str, seconds: float = 30.0) -> None:
    """Poll until the condition is true, and raise `ChildError` after a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ChildError(f"waited {seconds:g} s without success: {what}")
        time.sleep(0.05)
