"""A load during a fault: producers that enqueue, commit and roll back, and workers as processes that deliver.

Each producer is a thread with its own connection. After an error it records the outcome as far as it is known, and
opens another connection, like an application. Every wait is for a condition, with a deadline.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

import psycopg

from pgoutbox import Outbox
from tests.support.ledger import KEY, LEDGER_VARIABLE, Ledger, Verdict, install_audit, judge, owed_count, read_entries
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until
from tests.support.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from psycopg.rows import TupleRow

TOPIC: Final = "faults.deliver"

_EVERY_SO_MANY_ROLLS_BACK: Final = 7
_EVERY_SO_MANY_COALESCES: Final = 4


def start_worker(dsn: str, ledger: Path, log: Path, settings: Mapping[str, str]) -> WorkerProcess:
    """Start a worker with the handlers of tests/support/load_app.py, which write to this ledger."""
    return WorkerProcess(
        "tests.support.load_app:outbox",
        log=log,
        settings={"dsn": dsn, "poll_interval_seconds": "2", **settings},
        environment={LEDGER_VARIABLE: str(ledger)},
    )


class Load:
    """Producers and workers on one database, with their ledger in `directory`, until the end of the block."""

    def __init__(
        self,
        dsn: str,
        directory: Path,
        *,
        producers: int = 2,
        pause_seconds: float = 0.004,
        padding_bytes: int = 0,
    ) -> None:
        self.dsn = dsn
        self.errors: Counter[str] = Counter()
        """What producers met: SQLSTATEs, and `connection` where there was none."""
        self._outbox = Outbox()
        self._directory = directory
        self._ledger = Ledger(directory / "ledger")
        self._pause_seconds = pause_seconds
        self._padding_bytes = padding_bytes
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(producers, thread_name_prefix="producer")
        self._producer_count = producers
        self._producing: list[Future[None]] = []
        self.workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        with psycopg.connect(self.dsn) as connection:
            install_audit(connection)
        self._producing = [self._threads.submit(self._produce, f"p{n}") for n in range(self._producer_count)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        for worker in self.workers:
            worker.end()
        self._threads.shutdown()
        self._ledger.close()
        if error is not None:
            error.add_note("\n".join(f"worker {w.pid}:\n{w.log[-3000:]}" for w in self.workers))

    def start_worker(self, *, dsn: str | None = None, **settings: str) -> WorkerProcess:
        """Start one more worker."""
        log = self._directory / f"worker-{len(self.workers)}.log"
        worker = start_worker(dsn or self.dsn, self._ledger.path, log, settings)
        self.workers.append(worker)
        return worker

    @property
    def acknowledged_count(self) -> int:
        """Return how many messages are known to be committed."""
        return len(read_entries(self._ledger.path).acknowledged)

    @property
    def handed_over_count(self) -> int:
        """Return how many messages were handed over at least once."""
        return len(read_entries(self._ledger.path).hand_overs)

    @property
    def handed_over_keys(self) -> frozenset[str]:
        """Return the keys of the messages that were handed over."""
        return frozenset(read_entries(self._ledger.path).hand_overs)

    def until_more_are_acknowledged(self, number: int = 30) -> None:
        """Wait until this many more messages are committed."""
        goal = self.acknowledged_count + number
        wait_until(lambda: self.acknowledged_count >= goal, lambda: f"{number} more commits; errors: {self.errors}")

    def until_more_are_handed_over(self, number: int = 30) -> float:
        """Wait until this many more messages were handed over. Return the seconds until the first one."""
        began_at = time.monotonic()
        former = self.handed_over_count
        wait_until(lambda: self.handed_over_count > former, lambda: "the next hand-over")
        resumed_after = time.monotonic() - began_at
        wait_until(lambda: self.handed_over_count >= former + number, lambda: f"{number} more hand-overs")
        return resumed_after

    def stop_producers(self) -> None:
        """Stop the producers. Raise any error that did not come from the database."""
        self._stopping.set()
        for future in self._producing:
            future.result(timeout=PROCESS_PATIENCE_SECONDS)

    def settle(self, dsn: str | None = None, *, exit_codes: Sequence[int] = (0,)) -> Verdict:
        """Stop the producers, wait until everything has drained, stop the workers and compare the books."""
        self.stop_producers()
        with psycopg.connect(dsn or self.dsn, autocommit=True) as connection:
            wait_until(lambda: owed_count(connection) == 0, lambda: "the queue has drained")
            for worker in self.workers:
                code = worker.stop()
                assert code in exit_codes, f"a worker ended with {code}:\n{worker.log}"
            return self.judge(connection)

    def judge(self, connection: psycopg.Connection[TupleRow]) -> Verdict:
        """Compare the ledger with the database in its current state."""
        return judge(self._ledger.path, connection)

    def committing(
        self, connection: psycopg.Connection[TupleRow], *keys: str
    ) -> contextlib.AbstractContextManager[None]:
        """Commit at the end of the block and record the result, for a producer that the test itself runs."""
        return self._ledger.committing(connection, *keys)

    def enqueue(self, connection: psycopg.Connection[TupleRow], key: str, *, coalesces: bool = False) -> None:
        """Enqueue one message."""
        payload = {KEY: key, "padding": secrets.token_hex(self._padding_bytes // 2)}
        if coalesces:
            # Each connection has its own key: after a network failure, a lost transaction may hold its lock for long.
            self._outbox.on(connection).enqueue(TOPIC, payload, coalesce_key=f"faults-{connection.info.backend_pid}")
        else:
            self._outbox.on(connection).enqueue(TOPIC, payload)

    def _produce(self, name: str) -> None:
        number = 0
        while not self._stopping.is_set():
            try:
                with contextlib.closing(psycopg.connect(self.dsn, connect_timeout=10)) as connection:
                    while not self._stopping.is_set():
                        number += 1
                        rolls_back = number % _EVERY_SO_MANY_ROLLS_BACK == 0
                        ending = self._ledger.rolling_back if rolls_back else self._ledger.committing
                        key = f"{name}-{number}"
                        with ending(connection, key):
                            self.enqueue(connection, key, coalesces=number % _EVERY_SO_MANY_COALESCES == 0)
                        self._stopping.wait(self._pause_seconds)
            except psycopg.Error as error:
                self.errors[error.sqlstate or "connection"] += 1
                self._stopping.wait(0.02)
