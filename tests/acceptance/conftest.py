"""Worker processes and a shell for the acceptance tests, and the channel on which handlers report."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from pgoutbox.settings import ENVIRONMENT_PREFIX
from tests.support.app import CHANNEL
from tests.support.example_shell import Shell
from tests.support.smtp_server import Inbox, accepting_server
from tests.support.waiting import PROCESS_PATIENCE_SECONDS
from tests.support.worker_process import WorkerProcess

StartWorker = Callable[..., WorkerProcess]


class Progress:
    """The handlers' reports, in their order."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._reports: deque[str] = deque()
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL)))

    def wait_for(self, what: str) -> tuple[int, int, int]:
        """Return the message id, attempt and process of the next report of this kind."""
        while True:
            while self._reports:
                kind, message_id, attempt_count, pid = self._reports.popleft().split()
                if kind == what:
                    return int(message_id), int(attempt_count), int(pid)
            self._reports.extend(
                n.payload for n in self._connection.notifies(timeout=PROCESS_PATIENCE_SECONDS, stop_after=1)
            )
            assert self._reports, f"no handler reported {what!r} within {PROCESS_PATIENCE_SECONDS:g} s"


@pytest.fixture
def progress(dsn: str) -> Iterator[Progress]:
    """Listens to the handlers of tests/support/app.py."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Progress(connection)


@pytest.fixture
def start_worker(dsn: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts `pgoutbox worker` with the handlers of tests/support/app.py, and kills it when the test ends."""
    with ExitStack() as stack:
        numbers = count(1)

        def start(*arguments: str, **settings: str) -> WorkerProcess:
            worker = WorkerProcess(
                "tests.support.app:outbox",
                *arguments,
                log=tmp_path / f"worker-{next(numbers)}.log",
                settings={"dsn": dsn, **settings},
            )
            stack.callback(worker.end)
            return worker

        yield start


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    """An SMTP server that accepts every e-mail."""
    async with accepting_server() as inbox:
        yield inbox


@pytest.fixture
def shell(dsn: str, inbox: Inbox, tmp_path: Path) -> Shell:
    """A shell with the settings that examples/README.md names."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    environment |= {
        "PGOUTBOX_DSN": dsn,
        "PGOUTBOX_SMTP_HOST": "127.0.0.1",
        "PGOUTBOX_SMTP_PORT": str(inbox.port),
        "PGOUTBOX_SMTP_SECURITY": "none",
        "PGOUTBOX_SMTP_SENDER": "office@club.test",
        "SEARCH_INDEX": str(tmp_path / "index.jsonl"),
    }
    return Shell(environment)
