"""Worker processes that tests kill, stop and mislead, and the ledger outside the database that records their work."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from tests.support.ledger import LEDGER_VARIABLE, read_entries
from tests.support.waiting import wait_until
from tests.support.worker_process import WorkerProcess, connection_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import psycopg

GATE_VARIABLE = "FAULTS_GATE"
SUSPEND_VARIABLE = "FAULTS_SUSPEND"


class Fleet:
    """Starts workers with the handlers of `tests.support.fleet_app`, and reads their ledger."""

    def __init__(self, dsn: str, directory: Path) -> None:
        self._dsn = dsn
        self.ledger = directory / "ledger"
        self.ledger.touch()
        self.gate = directory / "gate"
        self._log = directory / "log"
        self._log.touch()
        self._workers: list[WorkerProcess] = []

    def start(
        self,
        *arguments: str,
        app: str = "tests.support.fleet_app:outbox",
        prefix: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        **settings: str,
    ) -> WorkerProcess:
        """Start one worker, with the command `prefix` in front if one is given. The worker is killed when the test
        ends."""
        worker = WorkerProcess(
            app,
            *arguments,
            log=self._log,
            settings={"dsn": self._dsn, **settings},
            environment={LEDGER_VARIABLE: str(self.ledger), GATE_VARIABLE: str(self.gate), **(environment or {})},
            prefix=prefix,
        )
        self._workers.append(worker)
        return worker

    @property
    def log(self) -> str:
        """Return the logs of all workers."""
        return self._log.read_text()

    def hand_overs(self) -> list[tuple[int, int]]:
        """Return the message id and the attempt of each hand-over, in the order of the ledger."""
        return [(int(line.key), line.attempt_count) for line in read_entries(self.ledger).hand_over_order]

    def deliveries(self) -> Counter[int]:
        """Return how often each message was handed over."""
        return Counter(message_id for message_id, _ in self.hand_overs())

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds."""
        wait_until(condition, lambda: f"{what}\n{self.log}")

    def until_disconnected(self, db: psycopg.Connection) -> None:
        """Wait until the server has ended all sessions of workers, and so has processed all their statements."""
        self.until(lambda: connection_count(db) == 0, "the server ends the sessions of the dead")

    def close(self) -> None:
        """Kill the workers that still run."""
        for worker in self._workers:
            worker.end()


@contextlib.contextmanager
def fleet_on(dsn: str, directory: Path) -> Iterator[Fleet]:
    """Yield a fleet, and kill its workers at the end of the block."""
    fleet = Fleet(dsn, directory)
    try:
        yield fleet
    finally:
        fleet.close()
