"""The faults of processes, of the network and of PostgreSQL, which the soak and the rehearsal of an upgrade share. They
are drawn from a seed. Each fault is undone before the next one begins."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg

from pgoutbox.embedded import EmbeddedServer
from tests.soak.crew import LEASE_SECONDS, Process
from tests.support.proxy import Moment, Proxy

IN_VAIN_SUFFIX: Final = "_in_vain"
# If the nemesis does not get a lock, that is not an error: the row has moved to another partition, or another session
# was faster.
_IN_VAIN: Final = (
    psycopg.errors.SerializationFailure, psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected
)  # fmt: skip


@dataclass(slots=True)
class Targets:
    """The server and the processes under attack. Workers connect through the proxy."""

    server: EmbeddedServer
    proxy: Proxy
    workers: list[Process]
    producers: list[Process]

    def keep_alive(self) -> None:
        """Restart processes that have ended."""
        for process in (*self.workers, *self.producers):
            process.keep_alive()

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection]:
        """Open a superuser connection for the nemesis."""
        with psycopg.connect(self.server.dsn, autocommit=True, application_name="nemesis") as connection:
            yield connection


@dataclass(slots=True)
class Faults:
    """Draws faults from `chance` and counts them."""

    fleet: Targets
    chance: random.Random
    faults: Sequence[tuple[Callable[[Any], None], int]]
    injected: Counter[str] = field(default_factory=Counter)

    def strike(self) -> str:
        """Inject one fault and undo it. Return its name."""
        fault = self.chance.choices([fault for fault, _ in self.faults], [weight for _, weight in self.faults])[0]
        name = fault.__name__
        try:
            fault(self)
        except _IN_VAIN:
            name += IN_VAIN_SUFFIX
        self.injected[name] += 1
        return name

    def kill_worker(self) -> None:
        """Kill a worker and its children (SIGKILL)."""
        self.chance.choice(self.fleet.workers).signal(signal.SIGKILL)

    def kill_supervisor(self) -> None:
        """Kill only the parent (SIGKILL): the children have to notice."""
        victim = self.chance.choice(self.fleet.workers).running
        if victim is not None:
            victim.kill()

    def stop_worker(self) -> None:
        """Send SIGTERM: the worker releases its messages and ends."""
        victim = self.chance.choice(self.fleet.workers).running
        if victim is not None:
            victim.send_signal(signal.SIGTERM)

    def suspend_worker(self) -> None:
        """Stop a worker (SIGSTOP) for longer than a lease, so that another worker takes over, then continue it."""
        victim = self.chance.choice(self.fleet.workers)
        victim.signal(signal.SIGSTOP)
        self._wait(LEASE_SECONDS * self.chance.uniform(1.1, 2.0))
        victim.signal(signal.SIGCONT)

    def stall_network(self) -> None:
        """Delay the statements of the workers behind the proxy for longer than a lease, then deliver them."""
        with self.fleet.proxy.stalled(open_connections_only=self.chance.random() < 0.5):
            self._wait(LEASE_SECONDS * self.chance.uniform(1.1, 2.0))

    def lose_replies(self) -> None:
        """Hold back PostgreSQL's answers to the workers behind the proxy; their statements still arrive."""
        with self.fleet.proxy.stalled(replies_only=True):
            self._wait(LEASE_SECONDS * self.chance.uniform(0.2, 2.0))

    def cut_connection(self) -> None:
        """Cut the connection of one of the next statements behind the proxy: before it, after it, or at its reply."""
        self.fleet.proxy.cut_at(self.chance.randrange(1, 20), self.chance.choice(list(Moment)))
        self._wait(self.chance.uniform(0.1, 1.0))

    def kill_producer(self) -> None:
        """Kill a producer (SIGKILL) in any transaction."""
        self.chance.choice(self.fleet.producers).signal(signal.SIGKILL)

    def terminate_backends(self) -> None:
        """Terminate a few random sessions of workers, listeners, handlers or producers."""
        with self.fleet.connection() as connection:
            pids = [
                pid
                for (pid,) in connection.execute(
                    "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                    " ORDER BY pid"
                )
            ]
            for pid in self.chance.sample(pids, min(len(pids), self.chance.randrange(1, 6))):
                connection.execute("SELECT pg_terminate_backend(%s)", (pid,))

    def crash_server(self) -> None:
        """Crash PostgreSQL and let it recover."""
        restart(self.fleet.server, "immediate")

    def restart_server(self) -> None:
        """Restart PostgreSQL cleanly."""
        restart(self.fleet.server, "fast")

    def lock_rows(self) -> None:
        """Lock the oldest rows in another session."""
        with self.fleet.connection() as connection, connection.transaction():
            connection.execute(
                "SELECT FROM pgoutbox.message_live ORDER BY available_at LIMIT 200 FOR UPDATE SKIP LOCKED"
            )
            self._wait(self.chance.uniform(0.2, 2.0))

    def lock_table(self) -> None:
        """Lock the whole table in another session, like a migration."""
        with self.fleet.connection() as connection, connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '500ms'")
            connection.execute("LOCK TABLE pgoutbox.message IN ACCESS EXCLUSIVE MODE")
            self._wait(self.chance.uniform(0.2, 1.5))

    def hold_snapshot(self) -> None:
        """Hold back vacuum with a long transaction."""
        with self.fleet.connection() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT count(*) FROM pgoutbox.message_live")
            self._wait(self.chance.uniform(1.0, 5.0))

    def vacuum(self) -> None:
        """Run vacuum during the load."""
        with self.fleet.connection() as connection:
            connection.execute("VACUUM (ANALYZE) pgoutbox.message_live, pgoutbox.message_done")

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.fleet.keep_alive()
            time.sleep(0.05)


def restart(server: EmbeddedServer, mode: str) -> None:
    """Stop PostgreSQL in this mode, restart it with the same settings, and wait until it accepts connections."""
    with psycopg.connect(server.dsn) as connection:
        row = connection.execute("SELECT setting FROM pg_config WHERE name = 'BINDIR'").fetchone()
    assert row is not None
    owner = server.data_directory.stat()
    root = os.geteuid() == 0
    subprocess.run(
        [
            Path(row[0]) / "pg_ctl", "restart", "-s", "-w", "-t", "120", "-m", mode,
            "-D", server.data_directory, "-l", server.socket_directory / "log",
        ],
        user=owner.st_uid if root else None,
        group=owner.st_gid if root else None,
        extra_groups=[] if root else None,
        cwd="/",
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
