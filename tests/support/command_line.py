"""Run the command line in this process, in another one, or on a terminal; fixtures for `conftest.py` files."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox.cli.main import main
from pgoutbox.settings import ENVIRONMENT_PREFIX
from tests.support.forks import LIBRARIES, forks, run_command

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a command."""

    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> Any:  # noqa: ANN401 - a test indexes into it
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith(ENVIRONMENT_PREFIX):
            monkeypatch.delenv(variable)


@pytest.fixture
def cli_anywhere(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command in this process, without a database."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        exit_code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(exit_code, captured.out, captured.err)

    return run


@pytest.fixture
def cli(dsn: str, monkeypatch: pytest.MonkeyPatch, cli_anywhere: Callable[..., Done]) -> Callable[..., Done]:
    """Run a command in this process, on the test's own database."""
    monkeypatch.setenv("PGOUTBOX_DSN", dsn)
    return cli_anywhere


def run_process(*arguments: str, dsn: str | None = None, stdin: bytes = b"", **environment: str) -> Done:
    """Run a command in a separate process, like a script."""
    given = os.environ | ({"PGOUTBOX_DSN": dsn} if dsn is not None else {}) | environment
    command = ("-m", "pgoutbox", *arguments)
    if stdin:
        done = subprocess.run([sys.executable, *command], env=given, input=stdin, capture_output=True, check=False)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())
    forked = run_command(*command, cwd=Path.cwd(), env=given)
    return Done(forked.returncode, forked.stdout, forked.stderr)


def run_on_terminal(*arguments: str, dsn: str | None = None, keys: str = "", **environment: str) -> Done:
    """Run a command on its own terminal, like a person; `out` is the terminal's output."""
    terminal, its_end = pty.openpty()
    os.write(terminal, keys.encode())
    process = forks(*LIBRARIES).start(
        ["-m", "pgoutbox", *arguments],
        cwd=Path.cwd(),
        env={
            **os.environ,
            **({} if dsn is None else {"PGOUTBOX_DSN": dsn}),
            "TERM": "xterm",
            "COLUMNS": "200",
            **environment,
        },
        streams=(its_end, its_end, its_end),
    )
    os.close(its_end)
    shown = b""
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error.
        while piece := os.read(terminal, 65_536):
            shown += piece
    os.close(terminal)
    return Done(process.wait(), shown.decode(), "")
