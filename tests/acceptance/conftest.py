"""Worker processes for the acceptance tests, and the channel on which their handlers report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.support.app import CHANNEL
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
