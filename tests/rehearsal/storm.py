"""The faults of a rehearsal: those of the soak, and transactions that are in the way of a migration."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg

from pgoutbox.embedded import EmbeddedServer
from tests.soak.faults import Faults, Targets, restart
from tests.support.dump import dump_of
from tests.support.proxy import proxy_to

if TYPE_CHECKING:
    from tests.rehearsal.run import Fleet

HOLD_SECONDS: Final = 20.0
"""How long a transaction stays open that has locked a message."""
PREPARED_SECONDS: Final = 5.0
FAULTS: Final[list[tuple[Callable[[Any], None], int]]] = [
    (Faults.kill_worker, 8),
    (Faults.stop_worker, 3),
    (Faults.suspend_worker, 4),
    (Faults.stall_network, 3),
    (Faults.lose_replies, 3),
    (Faults.cut_connection, 4),
    (Faults.kill_producer, 4),
    (Faults.terminate_backends, 4),
    (Faults.crash_server, 1),
    (Faults.restart_server, 1),
    (Faults.lock_rows, 3),
    (Faults.lock_table, 2),
    (Faults.hold_snapshot, 2),
    (Faults.vacuum, 2),
]
_MIGRATES: Final = """
SELECT pid FROM pg_stat_activity WHERE application_name = 'pgoutbox migrate' AND xact_start IS NOT NULL
"""
_PREPARED: Final = "SELECT gid FROM pg_prepared_xacts"


@dataclass(slots=True)
class Storm:
    """Strikes a rehearsal. Its migrations are killed, and then run beside transactions that are in the way."""

    fleet: Fleet
    faults: Faults

    def strike(self) -> None:
        """Inject one fault, and start the ended processes again."""
        targets = self.faults.fleet
        targets.workers[:] = [process for name, process in self.fleet.processes.items() if "worker" in name]
        targets.producers[:] = [process for name, process in self.fleet.processes.items() if "producer" in name]
        self.faults.strike()
        self.fleet.keep_alive()

    def interrupt(self, migration: subprocess.Popen[str]) -> None:
        """Kill a migration or its session at some moment of its transaction, unless it ends before."""
        chance = self.faults.chance
        with self.faults.fleet.connection() as connection:
            while migration.poll() is None and not (found := connection.execute(_MIGRATES).fetchall()):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.2))
            if migration.poll() is not None:
                return
            if chance.random() < 0.5:
                migration.kill()
                return
            for (pid,) in found:
                connection.execute("SELECT pg_terminate_backend(%s)", [pid])

    @contextlib.contextmanager
    def obstacles(self) -> Iterator[None]:
        """Run a transaction that locks a message for long, a prepared one, and dumps, until the migration has ended."""
        ended = threading.Event()
        threads = [
            threading.Thread(target=run, args=[ended])
            for run in (self._hold_message, self._commit_prepared, self._dump)
        ]
        self._prepare()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    def _hold_message(self, ended: threading.Event) -> None:
        with (
            contextlib.suppress(psycopg.OperationalError),
            self.faults.fleet.connection() as connection,
            connection.transaction(force_rollback=True),
        ):
            connection.execute("SELECT FROM pgoutbox.message ORDER BY id DESC LIMIT 1 FOR UPDATE SKIP LOCKED")
            ended.wait(HOLD_SECONDS)

    def _dump(self, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            with contextlib.suppress(AssertionError, psycopg.OperationalError):
                dump_of(self.faults.fleet.server.dsn)  # A fault may end it.

    def _prepare(self) -> None:
        number = random.SystemRandom().randrange(1 << 52)
        payload = json.dumps({"number": number, "campaign": None})
        with self.faults.fleet.connection() as connection:
            connection.execute("BEGIN")
            # PostgreSQL refuses to prepare a transaction that has notified a worker.
            connection.execute("SELECT pgoutbox.enqueue('rehearse', %s, notify => false)", [payload])
            connection.execute(f"PREPARE TRANSACTION '{number}'".encode())

    def _commit_prepared(self, ended: threading.Event) -> None:
        ended.wait(PREPARED_SECONDS)
        while True:
            with contextlib.suppress(psycopg.OperationalError), self.faults.fleet.connection() as connection:
                for (number,) in connection.execute(_PREPARED).fetchall():
                    connection.execute(f"COMMIT PREPARED '{number}'".encode())
                    with (self.fleet.directory / "ledger").open("a", buffering=1) as ledger:
                        entry = {"what": "acknowledged", "number": int(number), "seconds": 0.0, "at": time.time()}
                        ledger.write(json.dumps(entry) + "\n")
                return
            time.sleep(0.1)


@contextlib.contextmanager
def storm_over(fleet: Fleet, server: EmbeddedServer, chance: random.Random) -> Iterator[Storm]:
    """Put the workers of the fleet behind a proxy, and let it be struck."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET max_prepared_transactions = 10")
    restart(server, "fast")
    (fleet.directory / "proxy").mkdir()
    with proxy_to(fleet.dsn, fleet.directory / "proxy") as proxy:
        fleet.worker_dsn = proxy.dsn
        fleet.storm = storm = Storm(fleet, Faults(Targets(server, proxy, [], []), chance, FAULTS))
        yield storm
