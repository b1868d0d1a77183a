"""The nemesis: faults of processes and of PostgreSQL, drawn from a seed, each undone before the next one begins."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Final

import psycopg

from pgoutbox import maintenance, operations
from pgoutbox.embedded import EmbeddedServer
from pgoutbox.message import State
from pgoutbox.operations import Rate
from tests.faults.proxy import Moment, Proxy

LEASE_SECONDS: Final = 2.0
# Those whose handler takes long enough for something to meet it.
_IN_FLIGHT: Final = """
SELECT id, attempt_count FROM pgoutbox.message_live
WHERE state = 'sending' AND (payload ->> 'seconds')::float8 >= 0.5
"""
# A lock that the nemesis does not get is no fault: the row has moved to another partition, or somebody was faster.
_IN_VAIN: Final = (
    psycopg.errors.SerializationFailure, psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected
)  # fmt: skip


@dataclass(slots=True)
class Process:
    """A process that is started again whenever it has ended."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: IO[bytes]
    starts: int = 0
    running: subprocess.Popen[bytes] | None = None

    def keep_alive(self) -> None:
        """Start it unless it runs."""
        if self.running is None or self.running.poll() is not None:
            self.running = subprocess.Popen(
                self.command, env=self.environment, stdout=self.log, stderr=self.log, start_new_session=True
            )
            self.starts += 1

    def signal(self, number: int) -> None:
        """Send a signal to it and its children, if it runs."""
        if self.running is not None and self.running.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.running.pid, number)

    def stop(self, *, seconds: float) -> None:
        """Tell it to stop, and wait; kill it, and say so, if it does not."""
        if self.running is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.running.send_signal(signal.SIGTERM)
        try:
            self.running.wait(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{self.name} did not stop within {seconds:g} s of SIGTERM") from error
        finally:
            self.signal(signal.SIGKILL)


@dataclass(slots=True)
class Fleet:
    """What is shot at."""

    server: EmbeddedServer
    proxy: Proxy
    workers: list[Process]
    producers: list[Process]
    host: Process

    def keep_alive(self) -> None:
        """Start again what has ended."""
        for process in (*self.workers, *self.producers):
            process.keep_alive()

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection]:
        """A superuser's connection of the nemesis itself."""
        with psycopg.connect(self.server.dsn, autocommit=True, application_name="nemesis") as connection:
            yield connection


@dataclass(slots=True)
class Nemesis:
    """Draws faults from `chance` and counts them."""

    fleet: Fleet
    chance: random.Random
    injected: Counter[str] = field(default_factory=Counter)

    def strike(self) -> str:
        """Inject one fault and undo it; its name."""
        fault = self.chance.choices([fault for fault, _ in FAULTS], [weight for _, weight in FAULTS])[0]
        name = fault.__name__
        try:
            fault(self)
        except _IN_VAIN:
            name += "_in_vain"
        self.injected[name] += 1
        return name

    def kill_worker(self) -> None:
        """Kill -9 of a worker and its children."""
        self.chance.choice(self.fleet.workers).signal(signal.SIGKILL)

    def kill_supervisor(self) -> None:
        """Kill -9 of the parent alone: the children have to notice."""
        victim = self.chance.choice(self.fleet.workers).running
        if victim is not None:
            victim.kill()

    def stop_worker(self) -> None:
        """SIGTERM: the worker releases what it holds and ends."""
        victim = self.chance.choice(self.fleet.workers).running
        if victim is not None:
            victim.send_signal(signal.SIGTERM)

    def suspend_worker(self) -> None:
        """SIGSTOP for longer than a lease, so that another worker takes over, then SIGCONT."""
        victim = self.chance.choice(self.fleet.workers)
        victim.signal(signal.SIGSTOP)
        self._wait(LEASE_SECONDS * self.chance.uniform(1.1, 2.0))
        victim.signal(signal.SIGCONT)

    def stall_network(self) -> None:
        """What the workers behind the proxy send is on its way for longer than a lease, and arrives then."""
        with self.fleet.proxy.stalled(open_connections_only=self.chance.random() < 0.5):
            self._wait(LEASE_SECONDS * self.chance.uniform(1.1, 2.0))

    def stall_finishes(self) -> None:
        """The workers behind the proxy can neither finish nor renew, until another worker has one of their messages in
        its hands: at that moment the late finish arrives."""
        with contextlib.ExitStack() as stalls, self.fleet.connection() as connection:
            for session in ("finish", "lease", "ensure lease"):
                stalls.enter_context(self.fleet.proxy.stalled(f"pgoutbox {session}"))
            before = dict(connection.execute(_IN_FLIGHT).fetchall())
            until = time.monotonic() + 2.5 * LEASE_SECONDS
            while time.monotonic() < until:
                self._wait(0.05)
                now = dict(connection.execute(_IN_FLIGHT).fetchall())
                if any(now[message_id] > before[message_id] for message_id in before.keys() & now.keys()):
                    break

    def lose_replies(self) -> None:
        """PostgreSQL hears the workers behind the proxy, and they do not hear PostgreSQL."""
        with self.fleet.proxy.stalled(replies_only=True):
            self._wait(LEASE_SECONDS * self.chance.uniform(0.2, 2.0))

    def cut_connection(self) -> None:
        """Cut the connection of one of the next statements behind the proxy: before it, after it, or its reply."""
        self.fleet.proxy.cut_at(self.chance.randrange(1, 20), self.chance.choice(list(Moment)))
        self._wait(self.chance.uniform(0.1, 1.0))

    def kill_producer(self) -> None:
        """Kill -9 of a producer, in whatever transaction it is."""
        self.chance.choice(self.fleet.producers).signal(signal.SIGKILL)

    def terminate_backends(self) -> None:
        """Terminate a few random sessions: worker's, listener's, handler's, producer's."""
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
        """Restart PostgreSQL in good order."""
        restart(self.fleet.server, "fast")

    def lock_rows(self) -> None:
        """Another session holds the oldest rows."""
        with self.fleet.connection() as connection, connection.transaction():
            connection.execute(
                "SELECT FROM pgoutbox.message_live ORDER BY available_at LIMIT 200 FOR UPDATE SKIP LOCKED"
            )
            self._wait(self.chance.uniform(0.2, 2.0))

    def lock_table(self) -> None:
        """Another session holds the whole table, as a migration would."""
        with self.fleet.connection() as connection, connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '500ms'")
            connection.execute("LOCK TABLE pgoutbox.message IN ACCESS EXCLUSIVE MODE")
            self._wait(self.chance.uniform(0.2, 1.5))

    def hold_snapshot(self) -> None:
        """A long transaction holds vacuum back."""
        with self.fleet.connection() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT count(*) FROM pgoutbox.message_live")
            self._wait(self.chance.uniform(1.0, 5.0))

    def cancel(self) -> None:
        """An operator cancels some of what is owed.

        Not what has a dedupe key: it would go to another message, and the ledger has one message for each.
        """
        with self.fleet.connection() as connection:
            ids = [
                message_id
                for (message_id,) in connection.execute(
                    "SELECT id FROM pgoutbox.message_live WHERE dedupe_key IS NULL ORDER BY id DESC LIMIT 200"
                )
            ]
            for message_id in self.chance.sample(ids, min(len(ids), 5)):
                connection.execute("SELECT pgoutbox.cancel(%s)", (message_id,))

    def redrive(self) -> None:
        """An operator redrives everything that failed."""
        command = [sys.executable, "-m", "pgoutbox", "redrive", "--all-failed", "--yes", "--json"]
        environment = {**os.environ, "PGOUTBOX_DSN": self.fleet.server.dsn}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"redrive ended with {done.returncode}: {done.stderr}")

    def pause_queue(self) -> None:
        """An operator pauses a queue, somebody rings for it all the same, and it is resumed."""
        queue = self.chance.choice(["default", "ordered", "rated", "crowded"])
        with self.fleet.connection() as connection:
            # It ends by itself if the resume should be in vain.
            operations.pause_queue(connection, queue, duration=timedelta(seconds=5))
            connection.execute("SELECT pg_notify('pgoutbox', %s)", [queue])
            self._wait(self.chance.uniform(0.2, 2.0))
            operations.resume_queue(connection, queue)

    def change_limits(self) -> None:
        """An operator changes a rate, and how many may be in flight."""
        with self.fleet.connection() as connection:
            limit(connection, self.chance)

    def kill_destination(self) -> None:
        """The destination of some messages dies, or hangs, until its breaker has long been open."""
        host = self.fleet.host
        dies = self.chance.random() < 0.5
        host.signal(signal.SIGKILL if dies else signal.SIGSTOP)
        self._wait(self.chance.uniform(3.0, 6.0))
        host.signal(signal.SIGCONT)
        host.keep_alive()

    def prune(self) -> None:
        """An operator deletes what no rule keeps, and some of what halts its key."""
        with self.fleet.connection() as connection:
            maintenance.prune_by_retention(connection)
            maintenance.prune(connection, timedelta(seconds=1), states=[State.FAILED], topic="soak.halted")

    def vacuum(self) -> None:
        """Vacuum in the middle of it."""
        with self.fleet.connection() as connection:
            connection.execute("VACUUM (ANALYZE) pgoutbox.message_live, pgoutbox.message_done, pgoutbox.attempt")

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.fleet.keep_alive()
            time.sleep(0.05)


FAULTS: Final[list[tuple[Callable[[Nemesis], None], int]]] = [
    (Nemesis.kill_worker, 6),
    (Nemesis.kill_supervisor, 2),
    (Nemesis.stop_worker, 4),
    (Nemesis.suspend_worker, 8),
    (Nemesis.stall_network, 6),
    (Nemesis.stall_finishes, 8),
    (Nemesis.lose_replies, 4),
    (Nemesis.cut_connection, 8),
    (Nemesis.kill_producer, 3),
    (Nemesis.terminate_backends, 8),
    (Nemesis.crash_server, 2),
    (Nemesis.restart_server, 1),
    (Nemesis.lock_rows, 3),
    (Nemesis.lock_table, 2),
    (Nemesis.hold_snapshot, 2),
    (Nemesis.cancel, 3),
    (Nemesis.redrive, 2),
    (Nemesis.vacuum, 2),
    (Nemesis.pause_queue, 3),
    (Nemesis.change_limits, 4),
    (Nemesis.kill_destination, 6),
    (Nemesis.prune, 3),
]


def limit(connection: psycopg.Connection, chance: random.Random) -> None:
    """Give the limited queues other limits, which all leave room for what the producers make."""
    operations.limit_rate(connection, "rated", Rate(chance.choice([20, 40]), 1), burst=chance.choice([1, 5, 20]))
    operations.limit_in_flight(connection, "crowded", chance.choice([2, 3, 6]))


def restart(server: EmbeddedServer, mode: str) -> None:
    """Stop PostgreSQL in this mode, start it again with the same settings, and wait until it accepts connections."""
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
