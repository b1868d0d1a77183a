"""Tests that a program receives a test's interrupt, even in a background job of a script."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.foreground import in_foreground

IGNORING = ("/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh")
INTERRUPTED = ("-c", "import signal; signal.raise_signal(signal.SIGINT)")


@pytest.mark.parametrize(
    ("command", "exit_code"), [((sys.executable, *INTERRUPTED), 0), (in_foreground(*INTERRUPTED), -signal.SIGINT)]
)
def test_a_foreground_job_is_interrupted_even_if_its_parent_ignores_sigint(
    command: tuple[str, ...], exit_code: int
) -> None:
    assert subprocess.run([*IGNORING, *command], stderr=subprocess.DEVNULL, check=False).returncode == exit_code
