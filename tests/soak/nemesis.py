"""The nemesis: faults of processes and of PostgreSQL, drawn from a seed. Each fault is undone before the next one
begins."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, LiteralString

import psycopg
from psycopg.rows import TupleRow

from pgoutbox import NewMessage, Outbox
from pgoutbox.message import State
from pgoutbox.operations import Operator
from tests.soak.app import ACCOUNTS, EFFECT_TOPICS, LONELY_QUEUE, OWNERS, STEADY_QUEUE
from tests.soak.books import limit
from tests.soak.crew import LEASE_SECONDS, LONELY_WORKER, POLL_SECONDS, WORKER_ROLE, Process
from tests.soak.faults import IN_VAIN_SUFFIX, Faults, Targets
from tests.soak.liveness import PATIENCE_SECONDS
from tests.soak.producer import LEAVERS
from tests.soak.runs import Struck
from tests.support.ledger import KEY, Ledger

UNDO_SECONDS: Final = 30.0
SCHEDULED_SECONDS: Final = 1.0
HANG_SECONDS: Final = 10
"""PostgreSQL ends a deadlock after a second, and a handler ends earlier. A longer wait for its row does not end."""
NOTIFY_WARNING: Final = 0.8
NOTIFY_NO_RINGS: Final = 0.9
NOTIFY_NOTICED_SECONDS: Final = 4.0
"""How long a notification queue stays nearly full before it is full, so that workers check their listeners."""
# Topics whose handlers run long enough to be hit by a fault.
_IN_FLIGHT: Final = """
SELECT m.id, m.attempt_count FROM pgoutbox.message AS m
WHERE m.state = 'sending' AND (m.payload ->> 'seconds')::float8 >= 0.5
"""
# An attempt that outlasts its lease unless that is renewed.
_CROWDED_IN_FLIGHT: Final = f"""
SELECT m.id FROM pgoutbox.message AS m
WHERE m.state = 'sending' AND m.queue = 'crowded'
    AND (m.payload ->> 'seconds')::float8 > {LEASE_SECONDS}
    AND m.claimed_at > now() - interval '500 ms'
"""
_IN_FLIGHT_OF_LONELY: Final = f"""
SELECT FROM pgoutbox.message_live
WHERE state = 'sending' AND queue = '{LONELY_QUEUE}' AND claimed_at < now() - interval '50 ms'
"""
# Waiting in a transport: more than it has connections.
_IN_TRANSPORT: Final = """
SELECT split_part(worker, ':', 2)::integer
FROM pgoutbox.message_view
WHERE state = 'sending' AND topic = 'soak.mail'
GROUP BY 1
HAVING count(*) >= 3
"""
_PENDING: Final = "SELECT id FROM pgoutbox.message_view WHERE id = ANY (%s) AND state = 'pending'"
# Messages with a dedupe key are not cancelled: see `Nemesis.cancel`.
_EFFECTS_IN_FLIGHT: Final = """
SELECT id FROM pgoutbox.message_view
WHERE state = 'sending' AND topic LIKE 'soak.effect%' AND dedupe_key IS NULL
ORDER BY id DESC
LIMIT 3
"""
_CANCELLABLE: Final = """
SELECT id FROM pgoutbox.message_live WHERE dedupe_key IS NULL AND failure_of IS NULL ORDER BY id DESC LIMIT 200
"""
_TERMINATE_WORKERS: Final = f"""
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity AS a WHERE a.usename = '{WORKER_ROLE}'
"""


@dataclass(slots=True)
class Fleet(Targets):
    """The processes under attack."""

    host: Process
    postbox: Process
    ledger: Ledger


@dataclass(slots=True)
class Nemesis(Faults):
    """Draws faults from `chance` and counts them."""

    fleet: Fleet
    struck: list[Struck] = field(default_factory=list)

    def strike(self) -> str:
        """Inject one fault and undo it. Return its name."""
        began_at = time.time()
        name = super(Nemesis, self).strike()
        if name.removesuffix(IN_VAIN_SUFFIX) not in _KEEP_LEASES:
            self.struck.append(Struck(began_at, time.time()))
        return name

    def worker(self, name: str) -> Process:
        """Return the worker of this name."""
        return next(process for process in self.fleet.workers if process.name == f"worker-{name}")

    def suspend_only_worker(self) -> None:
        """Stop the only worker of a queue for longer than a lease while it handles a message, then continue it."""
        victim = self.worker(LONELY_WORKER)
        with self.fleet.connection() as connection:
            self._wait_for(connection, _IN_FLIGHT_OF_LONELY)
            victim.signal(signal.SIGSTOP)
        self._wait(LEASE_SECONDS * self.chance.uniform(1.1, 2.0))
        victim.signal(signal.SIGCONT)

    def suspend_sender(self) -> None:
        """Stop a worker while contents wait inside its transport, for longer than a lease, then continue it."""
        with self.fleet.connection() as connection:
            pids = {pid for (pid,) in self._wait_for(connection, _IN_TRANSPORT)}
            victims = [process for process in self.fleet.workers if pids & set(process.pids)]
            for victim in victims[:1]:
                victim.signal(signal.SIGSTOP)
                self._wait(LEASE_SECONDS * self.chance.uniform(1.1, 2.0))
                victim.signal(signal.SIGCONT)

    def stall_finishes(self) -> None:
        """Keep the workers behind the proxy from claiming, finishing and renewing until another worker has one of
        their messages. At that moment the late finish arrives."""
        with contextlib.ExitStack() as stalls, self.fleet.connection() as connection:
            for session in ("claim", "lease", "ensure"):  # The proxy knows the first two words of a name.
                stalls.enter_context(self.fleet.proxy.stalled(f"pgoutbox {session}"))
            before = dict(connection.execute(_IN_FLIGHT).fetchall())
            until = time.monotonic() + 2.5 * LEASE_SECONDS
            while time.monotonic() < until:
                self._wait(0.05)
                now = dict(connection.execute(_IN_FLIGHT).fetchall())
                if any(now[message_id] > before[message_id] for message_id in before.keys() & now.keys()):
                    break

    def refuse_finishes(self) -> None:
        """Refuse the finishes of some messages by a user trigger, for several leases."""
        modulus = self.chance.choice([2, 5, 20])
        refusal = [modulus, self.chance.randrange(modulus)]
        with self.fleet.connection() as connection:
            connection.execute("INSERT INTO soak_refusal (modulus, remainder) VALUES (%s, %s)", refusal)
            self._wait(LEASE_SECONDS * self.chance.uniform(4.0, 5.0))
        self._try_until_done("UPDATE soak_refusal SET until_at = clock_timestamp() WHERE until_at IS NULL")

    def change_encoding(self) -> None:
        """Give the workers' role an encoding that lacks some characters, then reset it."""
        encoding = self.chance.choice(["LATIN1", "SQL_ASCII", "EUC_JP"])
        with self.fleet.connection() as connection:
            connection.execute(f"ALTER ROLE {WORKER_ROLE} SET client_encoding = '{encoding}'".encode())
            connection.execute(_TERMINATE_WORKERS)
            self._wait(self.chance.uniform(2.0, 6.0))
        self._try_until_done(f"ALTER ROLE {WORKER_ROLE} RESET client_encoding")
        self._try_until_done(_TERMINATE_WORKERS)

    def fill_notify_queue(self) -> None:
        """Fill the notification queue with a listener of another database that stays in its transaction."""
        dsn = self.fleet.server.dsn_for("postgres")
        with (
            psycopg.connect(dsn, application_name="nemesis", autocommit=True) as listener,
            psycopg.connect(dsn, application_name="nemesis", autocommit=True) as notifier,
        ):
            listener.execute("LISTEN soak_full")
            with listener.transaction():
                listener.execute("SELECT 1")
                self._fill_to(notifier, NOTIFY_WARNING)
                self._wait(NOTIFY_NOTICED_SECONDS)
                # A suspended worker notices nothing, so enqueues ring for it until a tenth is left. That is 800 MB of a
                # real queue, but seven notifications of this one. The transactions that have rung commit before the
                # queue is full.
                self._fill_to(notifier, NOTIFY_NO_RINGS)
                self._wait_for_writers(notifier)
                self._fill_to(notifier, 1.0)
                self._wait(self.chance.uniform(1.0, 5.0))

    def _fill_to(self, connection: psycopg.Connection, usage: float) -> None:
        while connection.execute("SELECT pg_notification_queue_usage()").fetchall()[0][0] < usage:
            try:
                connection.execute("SELECT pg_notify('soak_full', repeat('x', 7000))")
            except psycopg.errors.ProgramLimitExceeded:
                return

    def _wait_for_writers(self, connection: psycopg.Connection) -> None:
        """Wait until all transactions of other databases that have written, or are about to, have ended."""
        ((now,),) = connection.execute("SELECT clock_timestamp()").fetchall()
        # An enqueue may look at the usage before its INSERT has an id of a transaction: then it is active.
        under_way = (
            "SELECT FROM pg_stat_activity"
            " WHERE datname <> current_database() AND (backend_xid IS NOT NULL OR state = 'active')"
        )
        while connection.execute(f"{under_way} AND xact_start < %s", [now]).fetchall():
            self._wait(0.05)

    def cancel(self) -> None:
        """Cancel some of the owed messages.

        This excludes messages with a dedupe key: another message would get the key, and the ledger has one message
        for each. It also excludes those of hooks: the verdict expects that each is sent.
        """
        with self.fleet.connection() as connection:
            ids = self._ids(connection, _CANCELLABLE)
            for message_id in self.chance.sample(ids, min(len(ids), 5)):
                connection.execute("SELECT pgoutbox.cancel(%s)", (message_id,))

    def cancel_and_change_mind(self) -> None:
        """Cancel messages in a transaction just before they fall due, and roll back after that."""
        with self._scheduled() as (connection, ids):
            for message_id in ids:
                connection.execute("SELECT pgoutbox.cancel(%s)", [message_id])

    def enqueue_and_change_mind(self) -> None:
        """Enqueue newer messages of debounced keys just before the older ones fall due, and roll back after that."""
        with self._scheduled() as (connection, _):
            Outbox().on(connection).enqueue_many(self._debounced())

    @contextlib.contextmanager
    def _scheduled(self) -> Iterator[tuple[psycopg.Connection, list[int]]]:
        """Schedule messages, and yield a transaction that is rolled back after they have fallen due.

        Then wait for the worker, and let no other scheduled message make it look.
        """
        ids = self._enqueue(self._debounced())
        with self.fleet.connection() as connection:
            with connection.transaction(force_rollback=True):
                self._isolate(connection)
                yield connection, ids
                self._wait(SCHEDULED_SECONDS + self.chance.uniform(0.2, 1.0))
            until = time.monotonic() + PATIENCE_SECONDS + POLL_SECONDS
            while connection.execute(_PENDING, [ids]).fetchall() and time.monotonic() < until:
                self._wait(0.2)

    def _debounced(self) -> list[NewMessage[dict[str, Any]]]:
        return [
            self._planned(queue=STEADY_QUEUE, coalesce_key=f"debounced-{number}", delay=SCHEDULED_SECONDS)
            for number in range(3)
        ]

    def _planned(
        self, *, queue: str, seconds: float = 0, coalesce_key: str | None = None, delay: float | None = None
    ) -> NewMessage[dict[str, Any]]:
        payload = {KEY: f"nemesis-{self.chance.randrange(1 << 60)}", "plan": ["ok"], "seconds": seconds}
        return NewMessage(
            "soak.async", payload, queue=queue, coalesce_key=coalesce_key, delay=delay, max_attempts=10_000
        )

    def _enqueue(self, messages: list[NewMessage[dict[str, Any]]]) -> list[int]:
        keys = [message.payload[KEY] for message in messages]
        with psycopg.connect(self.fleet.server.dsn) as connection, self.fleet.ledger.committing(connection, *keys):
            return [enqueued.id for enqueued in Outbox().on(connection).enqueue_many(messages)]

    def hold_cancel(self) -> None:
        """Cancel everything of an owner in a transaction that outlasts leases, then commit it or roll it back."""
        owner = self.chance.choice(["crowded", f"person-{self.chance.randrange(OWNERS)}"])
        with self._held_open() as connection:
            Outbox().on(connection).cancel_all(owner=owner)

    def hold_cancel_in_flight(self) -> None:
        """Cancel messages in flight of a limited queue in such a transaction, while others wait for their places."""
        self._enqueue([self._planned(queue="crowded", seconds=3.5) for _ in range(8)])
        with self.fleet.connection() as connection:
            self._wait_for(connection, _CROWDED_IN_FLIGHT)
        with self._held_open() as connection:
            for message_id in self._ids(connection, _CROWDED_IN_FLIGHT):
                connection.execute("SELECT pgoutbox.cancel(%s)", [message_id])

    def hold_erase(self) -> None:
        """Erase everything of an owner in a transaction that outlasts leases, then commit it or roll it back."""
        with self._held_open() as connection:
            connection.execute("SELECT pgoutbox.erase(owner => %s)", [f"leaver-{self.chance.randrange(LEAVERS)}"])

    def hold_limits(self) -> None:
        """Change limits in a transaction that outlasts leases, then commit it or roll it back."""
        with self._held_open() as connection:
            limit(connection, self.chance)

    @contextlib.contextmanager
    def _held_open(self) -> Iterator[psycopg.Connection]:
        rolls_back = self.chance.random() < 0.5
        with self.fleet.connection() as connection, connection.transaction(force_rollback=rolls_back):
            self._isolate(connection)
            yield connection
            self._wait(LEASE_SECONDS * self.chance.uniform(1.2, 2.5))

    def _isolate(self, connection: psycopg.Connection) -> None:
        if self.chance.random() < 0.5:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")

    def cancel_then_write(self) -> None:
        """Cancel messages of transactional handlers, then write rows that these handlers have written."""
        with self.fleet.connection() as connection:
            for message_id in self._ids(connection, _EFFECTS_IN_FLIGHT):
                try:
                    with connection.transaction():
                        connection.execute(f"SET LOCAL lock_timeout = '{HANG_SECONDS}s'".encode())
                        connection.execute("SELECT pgoutbox.cancel(%s)", [message_id])
                        connection.execute(
                            "UPDATE soak_account SET change_count = change_count + 1 WHERE id = %s",
                            [message_id % ACCOUNTS],
                        )
                except psycopg.errors.LockNotAvailable:
                    connection.execute("INSERT INTO soak_hung (message_id) VALUES (%s)", [message_id])

    def cancel_owner(self) -> None:
        """Cancel everything of one owner, as a business transaction does."""
        with self.fleet.connection() as connection, connection.transaction():
            Outbox().on(connection).cancel_all(owner=f"person-{self.chance.randrange(OWNERS)}")

    def reschedule(self) -> None:
        """Bring some pending messages forward, or put them off for a second."""
        with self.fleet.connection() as connection:
            ids = self._ids(connection, "SELECT id FROM pgoutbox.message_live WHERE state = 'pending' LIMIT 200")
            delay = self.chance.choice([None, 1.0])
            with connection.transaction():
                for message_id in self.chance.sample(ids, min(len(ids), 20)):
                    Outbox().on(connection).reschedule(message_id, delay=delay)

    def dismiss(self) -> None:
        """Dismiss some failed messages, also while they halt their ordering key."""
        with self.fleet.connection() as connection:
            ids = self._ids(
                connection,
                "SELECT id FROM pgoutbox.message WHERE state = 'failed' AND dedupe_key IS NULL ORDER BY id LIMIT 100",
            )
            for message_id in self.chance.sample(ids, min(len(ids), 5)):
                Operator(connection).dismiss(message_id, "planned")

    def _ids(self, connection: psycopg.Connection, query: LiteralString) -> list[int]:
        return [message_id for (message_id,) in connection.execute(query)]

    def redrive(self) -> None:
        """Redrive everything that failed."""
        command = [sys.executable, "-m", "pgoutbox", "redrive", "--all", "--yes", "--json"]
        environment = {**os.environ, "PGOUTBOX_DSN": self.fleet.server.dsn}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"redrive ended with {done.returncode}: {done.stderr}")

    def pause_queue(self) -> None:
        """Pause a queue, ring for it all the same, and resume it."""
        queue = self.chance.choice(["default", "ordered", "rated", "crowded"])
        with self.fleet.connection() as connection:
            # The pause ends by itself if the resume fails.
            Operator(connection).pause(queue, duration=timedelta(seconds=5))
            connection.execute("SELECT pg_notify('pgoutbox', %s)", [queue])
            self._wait(self.chance.uniform(0.2, 2.0))
            Operator(connection).resume(queue)

    def pause_topic(self) -> None:
        """Pause a topic, ring for it all the same, and resume it."""
        topic = self.chance.choice([*EFFECT_TOPICS, "soak.batch", "soak.halted", "soak.ordered", "soak.webhook"])
        with self.fleet.connection() as connection:
            # The pause ends by itself if the resume fails.
            Operator(connection).pause_topic(topic, duration=timedelta(seconds=5))
            connection.execute("SELECT pg_notify('pgoutbox', 'default')")
            self._wait(self.chance.uniform(0.2, 2.0))
            Operator(connection).resume_topic(topic)

    def change_limits(self) -> None:
        """Change a rate and an in-flight limit."""
        with self.fleet.connection() as connection:
            limit(connection, self.chance)

    def kill_destination(self) -> None:
        """Kill or stop the destination of some messages until its breaker has been open for long."""
        host = self.fleet.host
        dies = self.chance.random() < 0.5
        host.signal(signal.SIGKILL if dies else signal.SIGSTOP)
        self._wait(self.chance.uniform(3.0, 6.0))
        host.signal(signal.SIGCONT)
        host.keep_alive()

    def prune(self) -> None:
        """Prune by the rules, and delete some of the messages that halt their key."""
        with self.fleet.connection() as connection:
            Operator(connection).prune_by_retention()
            Operator(connection).prune(timedelta(seconds=1), states=[State.FAILED], topic="soak.halted")

    def _try_until_done(self, statement: str) -> None:
        """Repeat an action that undoes a fault until it succeeds: effects of an earlier fault may still block it."""
        until = time.monotonic() + UNDO_SECONDS
        while True:
            try:
                with self.fleet.connection() as connection:
                    connection.execute(statement.encode())
            except psycopg.Error:
                if time.monotonic() > until:
                    raise
                self._wait(0.1)
            else:
                return

    def _wait_for(self, connection: psycopg.Connection, query: LiteralString) -> list[TupleRow]:
        """Return the rows of a query as soon as it has some, or none after a while."""
        until = time.monotonic() + 2 * LEASE_SECONDS
        while not (found := connection.execute(query).fetchall()) and time.monotonic() < until:
            self._wait(0.02)
        return found


FAULTS: Final[list[tuple[Callable[[Nemesis], None], int]]] = [
    (Nemesis.kill_worker, 6),
    (Nemesis.kill_supervisor, 2),
    (Nemesis.stop_worker, 4),
    (Nemesis.suspend_worker, 8),
    (Nemesis.suspend_only_worker, 4),
    (Nemesis.refuse_finishes, 2),
    (Nemesis.change_encoding, 2),
    (Nemesis.fill_notify_queue, 2),
    (Nemesis.suspend_sender, 4),
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
    (Nemesis.cancel_owner, 2),
    (Nemesis.cancel_and_change_mind, 4),
    (Nemesis.enqueue_and_change_mind, 4),
    (Nemesis.cancel_then_write, 2),
    (Nemesis.hold_cancel, 2),
    (Nemesis.hold_cancel_in_flight, 3),
    (Nemesis.hold_erase, 3),
    (Nemesis.hold_limits, 3),
    (Nemesis.reschedule, 3),
    (Nemesis.dismiss, 2),
    (Nemesis.redrive, 2),
    (Nemesis.vacuum, 2),
    (Nemesis.pause_queue, 3),
    (Nemesis.pause_topic, 3),
    (Nemesis.change_limits, 4),
    (Nemesis.kill_destination, 6),
    (Nemesis.prune, 3),
]

_KEEP_LEASES: Final = frozenset(fault.__name__ for fault in (
    Nemesis.hold_cancel, Nemesis.hold_cancel_in_flight, Nemesis.hold_erase, Nemesis.hold_limits,
    Nemesis.cancel_and_change_mind, Nemesis.enqueue_and_change_mind, Nemesis.cancel_then_write, Nemesis.cancel,
    Nemesis.cancel_owner,
    Nemesis.change_limits, Nemesis.pause_queue, Nemesis.pause_topic, Nemesis.reschedule, Nemesis.kill_destination,
))  # fmt: skip
"""No lease of a living worker lapses during these faults."""


def chosen_faults(names: Collection[str]) -> list[tuple[Callable[[Nemesis], None], int]]:
    """Return the faults of these names, with equal frequency; without names, all faults that are on by default."""
    if not names:
        return FAULTS
    known = {fault.__name__: fault for fault, _ in FAULTS}
    return [(known[name], 1) for name in names]
