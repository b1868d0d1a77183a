"""Child processes, each a program of `benchmarks.programs`: they end with the `with` block, and with this process.

A child writes lines of JSON to its standard output. Its standard input says nothing: its end tells the child that this
process is gone.
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
    """A child process ended before it said what it was asked for."""


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
        """The next line that the child writes, or `ChildError` with what it wrote to its standard error."""
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
        """All further lines, until the child ends; `ChildError` if it does not end well."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            document = json.loads(line)
            assert isinstance(document, dict)
            yield document
        if self._process.wait() != 0:
            self._errors.seek(0)
            raise ChildError(f"{self._program} ended with {self._process.returncode}: {self._errors.read()[-2000:]}")

    def go(self) -> None:
        """Let a child begin that waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def interrupt(self) -> None:
        """Ask the child to come to its end; it may still write."""
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the child: politely at first."""
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
    """The command that runs a Python program of `benchmarks.programs`."""
    return [sys.executable, "-m", f"benchmarks.programs.{program}", *arguments]


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], *, dsn: str, environment: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """Run a program that speaks the same protocol, in whatever language, for the length of the `with` block."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PGOUTBOX_", "PGQUEUER_"))}
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the child object closes it
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**inherited, **(environment or {}), "PGOUTBOX_DSN": dsn},
        # Ctrl-C is for this process, which ends its children itself.
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
    """Run a program to its end and return the one line that it writes."""
    with child(program, *arguments, dsn=dsn) as started:
        return started.read()


def run_tool(command: list[str], *, dsn: str, timeout: float) -> str:
    """Run one of libpq's programs on the database of `dsn` and return what it printed, errors included."""
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
    """Ask again and again until the answer is yes; `ChildError` if it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ChildError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.05)
