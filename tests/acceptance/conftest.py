"""Worker processes for the acceptance tests, and the channel on which their handlers tell what they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import psycopg
import pytest
from psycopg import sql

from tests.acceptance.app import CHANNEL

StartWorker = Callable[..., subprocess.Popen[str]]
PATIENCE_SECONDS = 60.0
_ORPHAN_SECONDS = 5.0


class Progress:
    """What the handlers tell, in its order."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._reports: deque[str] = deque()
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL)))

    def wait_for(self, what: str) -> tuple[int, int, int]:
        """The message id, attempt and process of the next report of this kind."""
        while True:
            while self._reports:
                kind, message_id, attempt_count, pid = self._reports.popleft().split()
                if kind == what:
                    return int(message_id), int(attempt_count), int(pid)
            self._reports.extend(n.payload for n in self._connection.notifies(timeout=PATIENCE_SECONDS, stop_after=1))
            assert self._reports, f"no handler said {what!r} within {PATIENCE_SECONDS} s"


@pytest.fixture
def progress(dsn: str) -> Iterator[Progress]:
    """Listens to the handlers of tests/acceptance/app.py."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Progress(connection)


@pytest.fixture
def start_worker(dsn: str) -> Iterator[StartWorker]:
    """Starts `pgoutbox worker` with the handlers of tests/acceptance/app.py; killed when the test ends."""
    with ExitStack() as stack:

        def start(*arguments: str, **settings: str) -> subprocess.Popen[str]:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("PGOUTBOX_")}
            environment |= {"PGOUTBOX_DSN": dsn, "PGOUTBOX_LEASE_SECONDS": "2", "PGOUTBOX_LOG_FORMAT": "json"}
            environment |= {f"PGOUTBOX_{name.upper()}": value for name, value in settings.items()}
            process = subprocess.Popen(
                [sys.executable, "-m", "pgoutbox", "worker", "--app", "tests.acceptance.app:outbox", *arguments],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.callback(_end, process)
            return process

        yield start


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    if process.stderr is not None and not process.stderr.closed:
        try:
            process.communicate(timeout=_ORPHAN_SECONDS)
        except subprocess.TimeoutExpired as waited:
            # Children have outlived their supervisor, and hold its pipe.
            for pid in _children_in(waited.stderr or b""):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()


def _children_in(log: bytes) -> list[int]:
    """The processes that a supervisor's log says it has started."""
    records = [json.loads(line) for line in log.splitlines() if line.startswith(b"{")]
    return [record["pid"] for record in records if record.get("event") == "process_started"]
