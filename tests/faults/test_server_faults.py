"""Tests a PostgreSQL that crashes, restarts, is full or read-only, fails over or refuses connections under load.
Afterwards every committed message is delivered, and no rolled-back message.

Each fault is real. The ledger decides: each acknowledged message has one final state and was handed over, and the fault
made each second hand-over unavoidable. PGOUTBOX_TEST_ROUNDS repeats the faults for a long run; `--log-cli-level=INFO`
shows the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgoutbox import Context, Message, Outbox, Permanent, Sent
from pgoutbox.database.worker_connection import is_unreachable
from pgoutbox.message import Outcome, State
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker import Worker
from pgoutbox.worker.listener import new_doorbell
from tests.support.fleet import fleet_on
from tests.support.ledger import install_audit
from tests.support.load import Load, start_worker
from tests.support.outbox_actions import (
    attempts_of,
    enqueue,
    lapse,
    reports,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.servers import DATABASE, OwnServer, Workshop, open_workshop
from tests.support.waiting import until, wait_until
from tests.support.worker_sql import claim, run_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from pgoutbox.handlers import OnUnknown
    from tests.conftest import Connect
    from tests.support.ledger import Verdict
    from tests.support.worker_process import WorkerProcess

# Use a minute for a long run. This is long enough for the pauses between the worker's attempts to grow.
OUTAGE_SECONDS = float(os.environ.get("PGOUTBOX_TEST_OUTAGE_SECONDS", "2.5"))

_figures = logging.getLogger(__name__)

ROUNDS = int(os.environ.get("PGOUTBOX_TEST_ROUNDS", "2"))
MEMORY_SECONDS = float(os.environ.get("PGOUTBOX_TEST_MEMORY_SECONDS", "2"))

# The CPU share that a worker must not exceed while the database is away. It uses a hundredth of it.
IDLE_CPU_SHARE: Final = 0.5

WORKERS_SESSIONS: Final = ("pgoutbox claim", "pgoutbox lease", "pgoutbox listen")
PRODUCERS_SESSIONS: Final = ""
ANY_SESSION: Final = "%"


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    """Make servers that only these tests use."""
    with open_workshop(os.environ) as opened:
        yield opened


@pytest.fixture
def own_server(workshop: Workshop) -> Iterator[OwnServer]:
    """Run a server for one test."""
    with workshop.server() as server:
        server.start()
        yield server


@contextlib.contextmanager
def watched(worker: WorkerProcess, row: str, *, events_may_repeat: bool = False) -> Iterator[None]:
    """Assert that the worker neither spins nor floods its log nor ends during the block."""
    began_at, cpu_before, told_before = time.monotonic(), worker.cpu_seconds(), len(worker.events())
    yield
    seconds, cpu_seconds = time.monotonic() - began_at, worker.cpu_seconds() - cpu_before
    # Messages in flight when the block begins may still end in it.
    told = Counter(event for event in worker.events()[told_before:] if event != LogEvent.SKIPPED)
    _figures.info("%s: %.2f s CPU in %.2f s; told %s", row, cpu_seconds, seconds, dict(told))
    assert not worker.has_ended
    assert cpu_seconds < IDLE_CPU_SHARE * seconds
    assert events_may_repeat or all(count == 1 for count in told.values()), "each change of state is logged once"


def for_a_while(seconds: float) -> None:
    """Let a fault last for some time, without a condition."""
    threading.Event().wait(seconds)


def assert_agree(verdict: Verdict) -> None:
    """Assert that the ledger and the database agree, and that there was something to compare."""
    _figures.info("%s", verdict)
    assert verdict.violations == {}, verdict
    assert verdict.acknowledged_count > 0, verdict
    assert verdict.rolled_back_count > 0, verdict
    # Messages with a coalesce key may be superseded.
    assert set(verdict.states) <= {"sent", "skipped"}, verdict


def test_acknowledged_messages_are_delivered_after_a_server_crash(own_server: OwnServer, tmp_path: Path) -> None:
    with Load(own_server.dsn, tmp_path) as load:
        load.start_worker()
        load.until_more_are_handed_over()
        for _ in range(ROUNDS):
            own_server.stop("immediate")
            own_server.start()
            _figures.info("D1: resumed %.2f s after accept", load.until_more_are_handed_over())
        verdict = load.settle()
    assert_agree(verdict)
    assert load.errors["connection"] > 0


def test_a_worker_survives_a_stopped_server_without_spinning_or_flooding_its_log(
    own_server: OwnServer, tmp_path: Path
) -> None:
    with Load(own_server.dsn, tmp_path) as load:
        worker = load.start_worker()
        load.until_more_are_handed_over()
        with watched(worker, "D2"):
            own_server.stop("fast")
            for_a_while(OUTAGE_SECONDS)
        own_server.start()
        _figures.info("D2: resumed %.2f s after accept", load.until_more_are_handed_over())
        wait_until(lambda: "listener_back" in worker.events(), lambda: "the listener is back")
        assert_agree(load.settle())
        # The loss and the return of the server are logged once each.
        told = Counter(worker.events())
        assert told["database_lost"] == told["database_back"] == told["listener_lost"] == told["listener_back"] == 1


def test_terminating_random_backends_repeatedly_loses_nothing(dsn: str, connect: Connect, tmp_path: Path) -> None:
    victims: Counter[str] = Counter()
    db = connect(autocommit=True)
    with Load(dsn, tmp_path) as load:
        load.start_worker()
        load.start_worker()
        load.until_more_are_handed_over()
        for victim in [*WORKERS_SESSIONS, PRODUCERS_SESSIONS, ANY_SESSION] * (2 * ROUNDS):
            ended = db.execute(
                """
                SELECT application_name, pg_terminate_backend(pid, 10000)
                FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()
                    AND (application_name LIKE %s OR application_name LIKE %s)
                """,
                [victim, f"{victim} %"],
            ).fetchall()
            victims.update(" ".join(application.split()[:2]) or "producer" for application, _ in ended)
            load.until_more_are_handed_over(random.randrange(1, 10))
        verdict = load.settle()
    _figures.info("D3: terminated %s", dict(victims))
    assert_agree(verdict)
    # The lease keeper connects only for long attempts.
    assert victims.keys() >= {"producer", *WORKERS_SESSIONS} - {"pgoutbox lease"}


def test_worker_statements_are_repeated_after_deadlocks_and_lock_timeouts(
    own_server: OwnServer, tmp_path: Path
) -> None:
    with own_server.connect() as db, own_server.connect() as monitor:
        # The disturber never gives way, so the others are the victims. Each checks for a deadlock once, this long after
        # it began to wait.
        db.execute("ALTER ROLE postgres SET deadlock_timeout = '100ms'")
        db.execute("SET deadlock_timeout = '1min'")
        with Load(own_server.dsn, tmp_path) as load:
            load.until_more_are_acknowledged()

            def waits(statement: str) -> bool:
                """Return whether the worker waits for a lock in this statement."""
                # The first try of a finish waits for 20 ms, which is too short for a deadlock.
                sessions = monitor.execute(
                    "SELECT FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox claim %%' AND query LIKE %s "
                    "AND wait_event_type = 'Lock' AND clock_timestamp() - query_start > '50 ms'",
                    [f"%{statement} AS MATERIALIZED%"],
                )
                return sessions.rowcount > 0

            def has_more(sqlstate: str, before: int) -> bool:
                return own_server.errors_of("pgoutbox claim")[sqlstate] > before

            def deadlock(statement: str) -> bool:
                """Lock a table that the statement has locked, while it waits for another one."""
                before = own_server.errors_of("pgoutbox claim")["40P01"]
                if waits(statement):
                    with db.transaction(force_rollback=True):
                        db.execute("LOCK TABLE pgoutbox.message_live IN ACCESS EXCLUSIVE MODE")
                return has_more("40P01", before)

            def fail(statement: str) -> None:
                """Let a lock time out in this statement, and let a deadlock end it."""
                wait_until(partial(waits, statement), lambda: f"a wait in {statement}")
                before = own_server.errors_of("pgoutbox claim")["55P03"]
                wait_until(partial(has_more, "55P03", before), lambda: f"a lock timeout in {statement}")
                wait_until(partial(deadlock, statement), lambda: f"a deadlock in {statement}")

            with db.transaction():
                db.execute("LOCK TABLE pgoutbox.message_done IN ACCESS EXCLUSIVE MODE")
                worker = load.start_worker(lock_timeout_seconds="0.3")
                fail("judged")  # Its claims. It has nothing to finish.
            load.until_more_are_handed_over()
            with db.transaction():
                db.execute("LOCK TABLE pgoutbox.message_done IN ACCESS EXCLUSIVE MODE")
                fail("held")  # Its finishes. They come first.
            verdict = load.settle()
            # A renewal may have hit a lock too, and so may the query after a claim. Other repeated claims and finishes
            # log no warning. No attempt has to wait for the end of its lease.
            assert set(worker.events("WARNING", "ERROR")) <= {"lease_keeper_failed", "claim_lost"}
    _figures.info("D6: worker %s, producers %s", dict(own_server.errors_of("pgoutbox claim")), dict(load.errors))
    assert_agree(verdict)


def test_role_timeouts_end_statements_of_producers_but_not_of_workers(own_server: OwnServer, tmp_path: Path) -> None:
    limits = {
        "statement_timeout": "250ms",
        "lock_timeout": "500ms",
        "idle_in_transaction_session_timeout": "5s",
        "idle_session_timeout": "1500ms",
        "transaction_timeout": "750ms",
    }
    with own_server.connect() as db:
        if db.info.server_version < 170_000:
            del limits["transaction_timeout"]
        with Load(own_server.dsn, tmp_path) as load:
            for name, value in limits.items():
                db.execute(f"ALTER ROLE postgres SET {name} = '{value}'".encode())
            # The producers open new connections, with these limits.
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = '' AND pid <> pg_backend_pid()"
            )
            # The leases last longer than the table is locked, because nobody can renew them during the lock.
            worker = load.start_worker(lock_timeout_seconds="10", lease_seconds="30")
            load.until_more_are_handed_over()
            for _ in range(ROUNDS):
                with db.transaction():
                    db.execute("LOCK TABLE pgoutbox.message_live IN ACCESS EXCLUSIVE MODE")
                    for_a_while(2)
                load.until_more_are_handed_over(5)
            db.execute("ALTER ROLE postgres RESET ALL")
            verdict = load.settle()
            # A renewal may hit a message that is just being finished; the next renewal does not.
            assert set(worker.events("WARNING", "ERROR")) <= {"lease_keeper_failed"}
    _figures.info("D7: producers %s", dict(load.errors))
    assert_agree(verdict)
    assert load.errors["57014"] > 0
    assert worker_errors(own_server).keys() <= {"40001"}


async def test_a_listener_that_leaves_during_notifications_logs_no_server_error(own_server: OwnServer) -> None:
    over = threading.Event()

    def ring() -> None:
        with own_server.connect() as db:
            while not over.is_set():
                db.execute("SELECT pg_notify('pgoutbox', 'all q' || n) FROM generate_series(1, 100) AS n")

    settings = settings_for(own_server.dsn)
    ringing = asyncio.create_task(asyncio.to_thread(ring))
    try:
        for _ in range(30):
            state = run_state(settings, queues=["q1"])
            bell = new_doorbell(state)
            await bell.start()
            await bell.hold(lambda: ("SELECT 1", {}))
            await state.kernel._wake.wait()
            await bell.stop()
    finally:
        over.set()
        await ringing
    assert own_server.errors_of("pgoutbox listen") == {}


def test_a_long_transaction_blocks_nothing_and_its_messages_are_delivered_after_its_commit(
    own_server: OwnServer, tmp_path: Path
) -> None:
    own_server.stop()
    own_server.start(log_min_duration_statement="0")
    with contextlib.closing(own_server.connect()) as user, Load(own_server.dsn, tmp_path) as load:
        load.start_worker()
        load.until_more_are_handed_over(200)
        for_a_while(OUTAGE_SECONDS / 4)
        usual = own_server.claim_milliseconds()
        user.set_autocommit(False)
        user.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with load.committing(user, "committed late"):
            load.enqueue(user, "committed late")
            snapshot = user.execute("SELECT pg_current_snapshot()::text").fetchone()
            load.until_more_are_handed_over(200)
            for_a_while(OUTAGE_SECONDS)
            load.until_more_are_handed_over()
            assert user.execute("SELECT pg_current_snapshot()::text").fetchone() == snapshot
            slow = own_server.claim_milliseconds()[len(usual) :]
        verdict = load.settle()
        (dead_count,) = user.execute(
            "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'message_live'"
        ).fetchone() or (0,)
    assert usual, "the server's log has no claims"
    for name, milliseconds in (("before", usual), ("meanwhile", slow)):
        half, most = (sorted(milliseconds)[int(len(milliseconds) * part)] for part in (0.5, 0.99))
        _figures.info("D8: %d claims %s, median %.2f ms, p99 %.2f ms", len(milliseconds), name, half, most)
    _figures.info("D8: %d dead rows at the end", dead_count)
    assert_agree(verdict)


def test_rows_locked_by_another_session_do_not_delay_others(dsn: str, connect: Connect, tmp_path: Path) -> None:
    oldest = [f"oldest-{number}" for number in range(1_000)]
    user = connect()
    with Load(dsn, tmp_path) as load:
        with load.committing(user, *oldest):
            for key in oldest:
                load.enqueue(user, key)
        locked = user.execute(
            "SELECT id FROM pgoutbox.message_live WHERE payload ->> 'ledger_key' LIKE 'oldest-%' FOR UPDATE"
        ).fetchall()
        assert len(locked) == 1_000
        load.start_worker()
        load.until_more_are_handed_over(100)
        assert load.handed_over_keys.isdisjoint(oldest)
        user.rollback()
        verdict = load.settle()
    assert_agree(verdict)


# --- footprint --------------------------------------------------------------------------------------------------------


def test_a_worker_that_reconnects_repeatedly_does_not_leak(dsn: str, connect: Connect, tmp_path: Path) -> None:
    """Takes a few seconds; PGOUTBOX_TEST_MEMORY_SECONDS makes it a long run, in which the memory is judged too."""
    db = connect(autocommit=True)
    with Load(dsn, tmp_path) as load:
        worker = load.start_worker()

        def reconnect_for(seconds: float, *, least: int = 0) -> int:
            ended, until = 0, time.monotonic() + seconds
            while (time.monotonic() < until or ended < least) and not worker.has_ended:
                ended += db.execute(
                    "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'"
                ).rowcount
                for_a_while(0.3)
            load.until_more_are_handed_over()
            return ended

        reconnect_for(max(2.0, MEMORY_SECONDS / 4))
        before = Footprint.of(worker.pid)
        # A leak of one file per reconnect becomes visible.
        ended_count = reconnect_for(MEMORY_SECONDS, least=2 * len(WORKERS_SESSIONS) + 1)
        wait_until(
            lambda: Footprint.of(worker.pid).is_within(before), lambda: f"{before} becomes {Footprint.of(worker.pid)}"
        )
        after = Footprint.of(worker.pid)
        handed_over_count = load.handed_over_count
        assert_agree(load.settle())
    grown_by = after.kilobytes - before.kilobytes
    _figures.info("P9: %d sessions ended, %d handed over: %+d kB", ended_count, handed_over_count, grown_by)
    _figures.info("P9: %s becomes %s", before, after)
    if "PGOUTBOX_TEST_MEMORY_SECONDS" in os.environ:
        assert grown_by < 5_000


class Footprint(NamedTuple):
    """The open files and threads of a process."""

    kilobytes: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Read the values of the kernel."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(
            int(status["VmRSS"].split()[0]), len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["Threads"])
        )

    def is_within(self, other: Footprint) -> bool:
        """Return whether this has no more threads, and no more files except for sessions that the other may not have
        had."""
        return self.files <= other.files + len(WORKERS_SESSIONS) and self.threads <= other.threads


# --- full disks -------------------------------------------------------------------------------------------------------


def fill(disk: Path) -> Path:
    """Fill a small disk with another file; delete the file to free the space."""
    ballast = disk / "ballast"
    # The error "no space left on device" is intended.
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(65_536)):
            pass
    return ballast


def test_a_full_disk_refuses_enqueues_and_loses_nothing(
    own_server: OwnServer, workshop: Workshop, tmp_path: Path
) -> None:
    with workshop.small_disk(megabytes=64) as disk:
        with own_server.connect("postgres") as db:
            db.execute(f"CREATE TABLESPACE small LOCATION '{disk}'".encode())
            db.execute(f"ALTER DATABASE {DATABASE} SET TABLESPACE small".encode())
        try:
            with Load(own_server.dsn, tmp_path, padding_bytes=8_000) as load:
                # A claim moves every row that it takes, so it needs space too.
                load.until_more_are_acknowledged(200)
                ballast = fill(disk)
                worker = load.start_worker()
                wait_until(lambda: "worker_started" in worker.events(), lambda: "the worker has started")
                wait_until(lambda: load.errors["53100"] > 0, lambda: "an enqueue that is refused")
                wait_until(
                    lambda: own_server.errors_of("pgoutbox claim")["53100"] > 0, lambda: "a claim that is refused"
                )
                with watched(worker, "D11", events_may_repeat=True):
                    for_a_while(1)
                refused_count = load.errors["53100"]
                ballast.unlink()
                _figures.info("D11: resumed %.2f s after there was space", load.until_more_are_handed_over())
                verdict = load.settle()
                assert "finish_refused" not in worker.events()
                _figures.info("D11: %d enqueues refused, worker %s", refused_count, dict(worker_errors(own_server)))
            assert_agree(verdict)
        finally:
            own_server.stop("immediate")  # It uses the disk that is about to be unmounted.


def damage(server: OwnServer, payload: object) -> tuple[int, int]:
    """Enqueue a message and its neighbour, and damage the payload of the first one. Return their ids."""
    with server.connect() as db:
        damaged = enqueue(db, payload=payload, max_attempts=1)
        neighbour = enqueue(db)
        row = db.execute(
            "SELECT pg_relation_filepath(reltoastrelid) FROM pg_class WHERE oid = 'pgoutbox.message_live'::regclass"
        ).fetchone()
        assert row is not None
    server.stop()
    os.truncate(server.data / row[0], 0)
    server.start()
    return damaged, neighbour


async def test_a_payload_damaged_on_disk_ends_the_worker_with_the_error(own_server: OwnServer) -> None:
    damaged, _ = damage(own_server, {"text": secrets.token_hex(5_000)})
    outbox = Outbox(settings_for(own_server.dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """Do nothing; no worker calls it."""

    worker = Worker(outbox)
    with pytest.raises(psycopg.DatabaseError):
        await worker.run()
    assert worker.telemetry.counts[LogEvent.CLAIM_REFUSED] == 1
    with own_server.connect() as db:
        found = db.execute("SELECT state FROM pgoutbox.message_live WHERE id = %s", [damaged]).fetchall()
    assert found == [("pending",)]


async def test_a_large_payload_damaged_on_disk_stops_only_its_own_message(own_server: OwnServer) -> None:
    damaged, neighbour = damage(own_server, {"text": secrets.token_hex(20_000)})
    outbox = Outbox(settings_for(own_server.dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """Do nothing; the damaged message does not come here."""

    await Worker(outbox).run_once()
    with own_server.connect() as db:
        # Its outcome cannot be written: the row with its payload would have to move.
        assert [row.state for row in rows_of(db, damaged, neighbour)] == ["sending", "sent"]


def test_a_disk_full_of_wal_crashes_the_server_and_loses_nothing(workshop: Workshop, tmp_path: Path) -> None:
    # Space for the WAL of many checkpoints: the disk is full only while the ballast is there.
    with workshop.small_disk(megabytes=512) as disk, workshop.server(wal_directory=disk) as server:
        server.start(min_wal_size="2MB", max_wal_size="16MB")

        def is_up_again() -> bool:
            # The server restarts by itself, unless it lacks the space to recover.
            with contextlib.suppress(psycopg.OperationalError), server.connect():
                return True
            return not server.is_running and server.try_start()

        with Load(server.dsn, tmp_path, padding_bytes=40_000) as load:
            worker = load.start_worker()
            load.until_more_are_handed_over()
            ballast = fill(disk)
            with watched(worker, "D12", events_may_repeat=True):
                wait_until(lambda: "PANIC:  53100" in server.log.read_text(), lambda: "a write of WAL that is refused")
                for_a_while(1)
            ballast.unlink()
            wait_until(is_up_again, lambda: "the server has recovered")
            _figures.info("D12: resumed %.2f s after accept", load.until_more_are_handed_over())
            assert_agree(load.settle())


# --- read-only --------------------------------------------------------------------------------------------------------


def test_a_worker_survives_a_server_that_becomes_read_only(own_server: OwnServer, tmp_path: Path) -> None:
    with Load(own_server.dsn, tmp_path) as load, own_server.connect() as db:
        worker = load.start_worker()
        load.until_more_are_handed_over()
        with watched(worker, "D14"):
            set_read_only(db, "on")
            wait_until(lambda: worker_errors(own_server)["25006"] > 0, lambda: "a worker's statement that is refused")
            for_a_while(2)
        _figures.info("D14: %d statements refused", worker_errors(own_server)["25006"])
        set_read_only(db, "off")
        _figures.info("D14: resumed %.2f s after it was writable", load.until_more_are_handed_over())
        verdict = load.settle()
    assert_agree(verdict)
    assert load.errors["25006"] > 0


def set_read_only(db: psycopg.Connection, value: str) -> None:
    """Make the whole server read-only or writable for every transaction that begins from now on."""
    db.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}".encode())
    db.execute("SELECT pg_reload_conf()")


def worker_errors(server: OwnServer) -> Counter[str]:
    """Return the SQLSTATEs of the errors that workers got."""
    return sum((server.errors_of(session) for session in WORKERS_SESSIONS), Counter())


def test_a_worker_refuses_a_read_only_server_at_the_start(own_server: OwnServer, tmp_path: Path) -> None:
    with own_server.connect() as db:
        db.execute("ALTER ROLE postgres SET default_transaction_read_only = on")
    assert_refused(own_server.dsn, tmp_path, "PGOUTBOX_DSN leads to a read-only session")


def test_a_worker_refuses_a_standby_at_the_start(workshop: Workshop, own_server: OwnServer, tmp_path: Path) -> None:
    with workshop.standby_of(own_server, "standby") as standby:
        standby.start()
        assert_refused(standby.dsn, tmp_path, "PGOUTBOX_DSN leads to a standby, which is read-only")


def assert_refused(dsn: str, directory: Path, reason: str) -> None:
    """Assert that a worker ends immediately with this reason and the exit code after which a unit starts it again."""
    worker = start_worker(dsn, directory / "ledger", directory / "log", {})
    try:
        assert worker.wait() == 1
    finally:
        worker.end()
    assert f"error: {reason}" in worker.log


# --- failover ---------------------------------------------------------------------------------------------------------


def test_a_failover_to_a_synchronous_standby_loses_nothing(
    workshop: Workshop, own_server: OwnServer, tmp_path: Path
) -> None:
    with own_server.connect() as db, workshop.standby_of(own_server, "heir") as heir:
        heir.start()
        db.execute("ALTER SYSTEM SET synchronous_standby_names = 'heir'")
        db.execute("SELECT pg_reload_conf()")
        wait_until(
            lambda: db.execute("SELECT sync_state FROM pg_stat_replication").fetchall() == [("sync",)],
            lambda: "the standby replicates synchronously",
        )
        with Load(dsn_of_either(own_server, heir), tmp_path) as load:
            worker = load.start_worker()
            load.until_more_are_handed_over()
            with watched(worker, "D15"):
                own_server.stop("immediate")
                heir.promote()
            _figures.info("D15: resumed %.2f s after the promotion", load.until_more_are_handed_over())
            assert_agree(load.settle())


async def test_a_worker_whose_claim_a_failover_lost_cannot_end_another_workers_attempt(
    workshop: Workshop, own_server: OwnServer
) -> None:
    """Both workers hold attempt 1 of the message, so the count alone does not distinguish them."""
    async with heir_cut_off(workshop, own_server) as (heir, message_id):
        dsn = dsn_of_either(own_server, heir)
        stale, owner = HeldWorker(dsn), HeldWorker(dsn)
        with reports() as heard:
            async with running(stale.worker):
                await stale.begun.wait()
                own_server.stop("immediate")
                heir.promote()
                with heir.connect() as db_after:
                    assert state_of(db_after, message_id) == State.PENDING
                    async with running(owner.worker):
                        await owner.begun.wait()
                        stale.ends_with.set_result(Permanent("refused on the lost timeline"))
                        await heard.wait_for(LogEvent.LEASE_LOST)
                        row = row_of(db_after, message_id)
                        assert (row.state, row.attempt_count, row.worker) == (State.SENDING, 1, owner.worker.name)
                        owner.ends_with.set_result(Sent())
                        await until(lambda: state_of(db_after, message_id) == State.SENT)
                    assert attempts_of(db_after, message_id) == []


async def test_a_worker_continues_an_attempt_whose_claim_a_failover_lost(
    workshop: Workshop, own_server: OwnServer
) -> None:
    """The message is pending on the new primary. The worker claims it again and starts no second attempt beside the
    first."""
    async with heir_cut_off(workshop, own_server) as (heir, message_id):
        dsn = dsn_of_either(own_server, heir)
        held = HeldWorker(dsn, concurrency=2)
        async with running(held.worker):
            await held.begun.wait()
            own_server.stop("immediate")
            heir.promote()
            with heir.connect() as db_after:
                await until(lambda: state_of(db_after, message_id) == State.SENDING)
                held.ends_with.set_result(Sent())
                await until(lambda: state_of(db_after, message_id) == State.SENT)
                row = row_of(db_after, message_id)
                assert (row.attempt_count, held.begun_count) == (1, 1)


@pytest.mark.parametrize(("on_unknown", "ends"), [("retry", State.SENT), ("hold", State.FAILED)])
async def test_a_worker_reports_an_outcome_lost_in_a_failover_as_unknown(
    workshop: Workshop, own_server: OwnServer, on_unknown: OnUnknown, ends: State
) -> None:
    """On the new primary the attempt is in flight. Its worker is alive but no longer holds it, and no other worker
    does."""
    async with standby_that_hears(workshop, own_server) as (heir, message_id, cut_off):
        dsn = dsn_of_either(own_server, heir)
        held = HeldWorker(dsn, on_unknown=on_unknown)
        async with running(held.worker):
            await held.begun.wait()
            with own_server.connect() as db:
                await cut_off(State.SENDING)
                held.ends_with.set_result(Sent())
                await until(lambda: state_of(db, message_id) == State.SENT)
            own_server.stop("immediate")
            heir.promote()
            with heir.connect() as db_after:
                assert state_of(db_after, message_id) == State.SENDING
                lapse(db_after, message_id)
                await until(lambda: state_of(db_after, message_id) == ends)
                assert [outcome for _, outcome, _ in attempts_of(db_after, message_id)] == ["lost"]
    assert held.begun_count == (2 if ends == State.SENT else 1)


def dsn_of_either(first: OwnServer, second: OwnServer) -> str:
    """Return a DSN that connects to the primary of two servers."""
    hosts = f"{first.home},{second.home}"
    return f"host={hosts} port=5432,5432 user=postgres dbname={DATABASE} target_session_attrs=read-write"


@contextlib.asynccontextmanager
async def heir_cut_off(workshop: Workshop, primary: OwnServer) -> AsyncIterator[tuple[OwnServer, int]]:
    """Create a standby that has one pending message, and receives no later change of it from the primary."""
    async with standby_that_hears(workshop, primary) as (heir, message_id, cut_off):
        await cut_off(State.PENDING)
        yield heir, message_id


@contextlib.asynccontextmanager
async def standby_that_hears(
    workshop: Workshop, primary: OwnServer
) -> AsyncIterator[tuple[OwnServer, int, Callable[[State], Awaitable[None]]]]:
    """Create a standby, a message, and a function that cuts the standby off once it has a state of the message."""
    with primary.connect() as db, workshop.standby_of(primary, "heir") as heir:
        heir.start()
        message_id = enqueue(db)
        with heir.connect() as replica:

            async def cut_off(state: State) -> None:
                await until(
                    lambda: (
                        replica.execute("SELECT id, state FROM pgoutbox.message").fetchall() == [(message_id, state)]
                    )
                )
                replica.execute("ALTER SYSTEM SET primary_conninfo = ''")
                replica.execute("SELECT pg_reload_conf()")
                await until(lambda: replica.execute("SELECT pid FROM pg_stat_wal_receiver").fetchall() == [])

            yield heir, message_id, cut_off


class HeldWorker:
    """A worker whose handler waits for its outcome."""

    def __init__(self, dsn: str, *, concurrency: int = 1, on_unknown: OnUnknown = "retry") -> None:
        outbox = Outbox(settings_for(dsn, concurrency=concurrency, poll_interval_seconds=1))
        self.begun = asyncio.Event()
        self.begun_count = 0
        self.ends_with: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        @outbox.handler("greet", on_unknown=on_unknown)
        async def greet(message: Message, ctx: Context) -> Outcome:
            self.begun_count += 1
            self.begun.set()
            return await asyncio.shield(self.ends_with)

        self.worker = Worker(outbox)


@pytest.fixture
def app_dsn(own_server: OwnServer) -> str:
    """Return the DSN of a role that is not a superuser, so that no reserved connections serve it."""
    with own_server.connect() as db:
        install_audit(db)
        db.execute("CREATE ROLE app LOGIN")
        for schema in ("pgoutbox", "public"):
            for things in ("SCHEMA", "ALL TABLES IN SCHEMA", "ALL SEQUENCES IN SCHEMA", "ALL FUNCTIONS IN SCHEMA"):
                db.execute(f"GRANT ALL ON {things} {schema} TO app".encode())
    return own_server.dsn.replace("postgres@", "app@")


# --- unreachable at the start -----------------------------------------------------------------------------------------


def test_a_worker_started_before_its_server_waits_for_it(own_server: OwnServer, tmp_path: Path) -> None:
    with Load(own_server.dsn, tmp_path) as load:
        own_server.stop()
        worker = load.start_worker()
        wait_until(lambda: "database_lost" in worker.events(), lambda: f"it waits\n{worker.log}")
        with watched(worker, "start, no server"):
            for_a_while(1)
        own_server.start()
        load.until_more_are_handed_over()
        assert_agree(load.settle())
        assert worker.events().count("database_lost") == 1


@pytest.mark.parametrize("how", ["the role has no connection", "the server has no free connections"])
def test_a_worker_started_while_the_server_has_no_free_connections_waits(
    own_server: OwnServer, app_dsn: str, tmp_path: Path, how: str
) -> None:
    with contextlib.ExitStack() as crowd, Load(own_server.dsn, tmp_path) as load:
        with own_server.connect() as db:
            if how == "the role has no connection":
                db.execute("ALTER ROLE app CONNECTION LIMIT 0")
        if how == "the server has no free connections":
            own_server.stop()
            own_server.start(max_connections="16", superuser_reserved_connections="12")
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    crowd.enter_context(psycopg.connect(app_dsn, autocommit=True))
        worker = load.start_worker(dsn=app_dsn)
        wait_until(lambda: "database_lost" in worker.events(), lambda: f"it waits\n{worker.log}")
        with watched(worker, f"start, {how}"):
            for_a_while(1)
        assert own_server.errors_of("[unknown]")["53300"] > 0
        crowd.close()
        with own_server.connect() as db:
            db.execute("ALTER ROLE app CONNECTION LIMIT 1")  # Enough connections to claim and to finish.
        load.until_more_are_handed_over()
        assert_agree(load.settle())


async def test_a_worker_treats_a_refusal_of_a_server_that_has_started_since_as_temporary(own_server: OwnServer) -> None:
    own_server.stop()
    with pytest.raises(psycopg.OperationalError) as refused:
        own_server.connect()
    own_server.start()
    assert await is_unreachable(refused.value, own_server.dsn, settings_for(own_server.dsn))


async def test_a_worker_waits_for_the_promotion_of_a_standby(own_server: OwnServer) -> None:
    """A worker that starts during a failover: its DSN has a server that is down, and a standby."""
    with own_server.connect() as db:
        db.execute("CREATE ROLE app LOGIN")
        db.execute("ALTER ROLE app SET default_transaction_read_only = on")
    dsn = f"host=/nowhere,{own_server.home} port=5432,5432 user=app dbname={DATABASE} target_session_attrs=read-write"
    with pytest.raises(psycopg.OperationalError, match="session is read-only") as refused:
        psycopg.connect(dsn)
    assert await is_unreachable(refused.value, dsn, settings_for(dsn))


async def test_a_worker_waits_for_a_pooler_that_goes_down_during_the_handshake_of_tls() -> None:
    def answer_the_question_for_tls(client: socket.socket) -> None:
        client.recv(8)
        client.sendall(b"S")
        client.recv(65_536)  # All of it: unread bytes would reset the connection.

    with socket.create_server(("127.0.0.1", 0)) as listening:
        dsn = f"host=127.0.0.1 port={listening.getsockname()[1]} dbname=club sslmode=require"
        refusal = await refusal_of(dsn, listening, answer_the_question_for_tls)
    assert "SSL error: unexpected eof" in str(refusal)
    assert await is_unreachable(refusal, dsn, settings_for(dsn))


async def test_a_worker_waits_for_a_server_that_goes_down_whatever_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "certificate"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(directory / ".s.PGSQL.5432"))
        listening.listen()
        dsn = f"host={directory} port=5432 dbname=club"
        refusal = await refusal_of(dsn, listening, lambda client: None)
    assert "certificate" in str(refusal)
    assert await is_unreachable(refusal, dsn, settings_for(dsn))


async def refusal_of(
    dsn: str, listening: socket.socket, answer: Callable[[socket.socket], None]
) -> psycopg.OperationalError:
    """Return the error of a connection that is closed after this answer."""

    def serve() -> None:
        client, _ = listening.accept()
        with client:
            answer(client)

    serving = asyncio.create_task(asyncio.to_thread(serve))
    with pytest.raises(psycopg.OperationalError) as refused:
        await psycopg.AsyncConnection.connect(dsn)
    await serving
    return refused.value


@pytest.mark.parametrize("mode", ["--once", "--drain"])
def test_once_and_drain_do_not_wait_for_a_server(own_server: OwnServer, tmp_path: Path, mode: str) -> None:
    own_server.stop()
    with fleet_on(own_server.dsn, tmp_path) as fleet:
        assert fleet.start(mode).wait() == 1
        assert "check PGOUTBOX_DSN and that the server is running" in fleet.log


LASTING = {
    "the password": ("app", "wrong", DATABASE, 'password authentication failed for user "app"'),
    "the role": ("nobody_here", "", DATABASE, 'role "nobody_here" does not exist'),
    "the database": ("postgres", "", "nowhere", 'database "nowhere" does not exist'),
    "the schema": ("postgres", "", "template1", "the database has no schema pgoutbox; run: pgoutbox migrate"),
}


@pytest.mark.parametrize("what", LASTING)
def test_a_worker_ends_immediately_with_the_reason_if_waiting_cannot_help(
    own_server: OwnServer, tmp_path: Path, what: str
) -> None:
    user, password, database, reason = LASTING[what]
    with own_server.connect() as db:
        db.execute("CREATE ROLE app LOGIN PASSWORD 'right'")
        (own_server.data / "pg_hba.conf").write_text("local all app scram-sha-256\nlocal all all trust\n")
        db.execute("SELECT pg_reload_conf()")
        dsn = make_conninfo(own_server.dsn, user=user, password=password, dbname=database)

        def refusal() -> str:
            try:
                psycopg.connect(dsn).close()
            except psycopg.OperationalError as error:
                return str(error)
            return reason

        wait_until(lambda: reason in refusal(), lambda: "the server has read its configuration")
    worker = start_worker(dsn, tmp_path / "ledger", tmp_path / "log", {})
    try:
        assert worker.wait() == 1
    finally:
        worker.end()
    assert reason in worker.log
    assert "database_lost" not in worker.events()


def test_a_worker_told_to_stop_while_waiting_for_its_server_stops(own_server: OwnServer, tmp_path: Path) -> None:
    own_server.stop()
    worker = start_worker(own_server.dsn, tmp_path / "ledger", tmp_path / "log", {})
    try:
        wait_until(lambda: "database_lost" in worker.events(), lambda: f"it waits\n{worker.log}")
        assert worker.stop() == 0
    finally:
        worker.end()


# --- too many connections ---------------------------------------------------------------------------------------------


def test_workers_without_all_their_connections_continue_with_the_ones_they_have(
    own_server: OwnServer, app_dsn: str, tmp_path: Path
) -> None:
    with Load(own_server.dsn, tmp_path, producers=1) as load:
        workers = [load.start_worker(dsn=app_dsn) for _ in range(3)]
        wait_until(
            lambda: all("worker_started" in worker.events() for worker in workers), lambda: "all workers have started"
        )
        load.until_more_are_handed_over()
        own_server.stop("fast")
        # Five connections are left, which is too few for three workers; the producer is a superuser.
        own_server.start(max_connections="12", superuser_reserved_connections="7")
        wait_until(lambda: own_server.errors_of("[unknown]")["53300"] > 0, lambda: "a connection that is refused")
        _figures.info("D17: resumed %.2f s after accept", load.until_more_are_handed_over(200))
        verdict = load.settle()
        for worker in workers:
            told = Counter(worker.events("WARNING", "ERROR"))
            _figures.info("D17: told %s", dict(told))
            assert told["database_lost"] <= 2, "each change of state is logged once"
    _figures.info("D17: %d connections refused", own_server.errors_of("[unknown]")["53300"])
    assert_agree(verdict)


def test_a_worker_without_a_connection_for_payloads_uses_its_claim_connection(
    own_server: OwnServer, app_dsn: str, tmp_path: Path
) -> None:
    with own_server.connect() as db:
        # One connection for the listener and one for the claims.
        db.execute("ALTER ROLE app CONNECTION LIMIT 2")
    with Load(own_server.dsn, tmp_path, padding_bytes=40_000) as load:  # A claim leaves out large payloads.
        load.start_worker(dsn=app_dsn)
        load.until_more_are_handed_over()
        wait_until(lambda: own_server.errors_of("[unknown]")["53300"] > 0, lambda: "a connection that is refused")
        load.until_more_are_handed_over()
        verdict = load.settle()
    assert_agree(verdict)
    assert verdict.duplicate_count == 0, verdict


def test_a_worker_without_a_connection_for_its_lease_keeper_keeps_its_leases(
    own_server: OwnServer, app_dsn: str, tmp_path: Path
) -> None:
    with own_server.connect() as db, fleet_on(app_dsn, tmp_path) as fleet:
        # One connection for the listener and one for everything else.
        db.execute("ALTER ROLE app CONNECTION LIMIT 2")
        asking, held = enqueue(db, "fault.asks"), enqueue(db, "fault.gated")
        worker = fleet.start(lease_seconds="1")
        fleet.until(lambda: held in fleet.deliveries() and asking in fleet.deliveries(), "the handlers run")
        first_lease = db.execute("SELECT clock_timestamp() + interval '2 s'").fetchone()
        fleet.until(lambda: db.execute("SELECT clock_timestamp() > %s", first_lease).fetchone() == (True,), "a lease")
        assert claim(db, topics=["fault.gated"], worker="thief") == []
        assert own_server.errors_of("[unknown]")["53300"] > 0
        fleet.gate.touch()
        fleet.until(lambda: (state_of(db, held), state_of(db, asking)) == ("sent", "sent"), "both are sent")
        worker.terminate()
        assert worker.wait() == 0
        assert row_of(db, held).attempt_count == 1
        assert fleet.deliveries() == {asking: 1, held: 1}
        assert "lease_keeper_failed" not in fleet.log


def test_a_worker_whose_claim_connection_is_refused_gives_up_another_one_for_it(
    own_server: OwnServer, app_dsn: str, tmp_path: Path
) -> None:
    """Its leases were renewed for ever, and it could neither end their messages nor claim others."""
    with own_server.connect() as db, fleet_on(app_dsn, tmp_path) as fleet:
        held = enqueue(db, "fault.gated")
        worker = fleet.start(lease_seconds="1")
        kept = "SELECT pid FROM pg_stat_activity WHERE application_name = 'pgoutbox lease'"
        fleet.until(lambda: held in fleet.deliveries() and db.execute(kept).fetchone(), "the lease is kept")
        db.execute("ALTER ROLE app CONNECTION LIMIT 2")  # The listener and the session of the leases stay.
        db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ '^pgoutbox claim'")
        fleet.until(lambda: own_server.errors_of("[unknown]")["53300"] > 0, "a connection that is refused")
        fleet.gate.touch()
        fleet.until(lambda: state_of(db, held) == "sent", "the message is sent")
        worker.terminate()
        assert worker.wait() == 0
        assert fleet.deliveries() == {held: 1}
