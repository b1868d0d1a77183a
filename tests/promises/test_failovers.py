"""After a lost connection, a worker relies on no lease that a new primary may not know, and harms no message."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.promises.test_repeated_hand_overs import TAKE_AWAY
from tests.support.outbox_actions import attempts_of, begin, enqueue, row_of
from tests.support.proxy import Moment, proxy_to
from tests.support.smtp_server import accepting_server, mail_settings
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import psycopg

    from pgoutbox import Outbox
    from tests.conftest import Connect
    from tests.promises.conftest import StartWorker
    from tests.support.smtp_server import Inbox

MAIL = """
    from pgoutbox import Email, Outbox

    outbox = Outbox()


    @outbox.handler("greet")
    async def greet(message, ctx):
        return Email(subject="Hello", text="Hello")
"""
APPLICATION = """
    import asyncio
    import os
    import signal
    from pathlib import Path

    from pgoutbox import Outbox

    outbox = Outbox()
    ledger = Path(os.environ["LEDGER"])
    told = asyncio.Event()


    async def until_told(name):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
        (ledger / name).touch()
        await told.wait()


    @outbox.handler("wait")
    async def wait(message, ctx):
        await until_told("wait")


    @outbox.handler("clock")
    async def clock(message, ctx):
        await until_told("clock")
        never = asyncio.create_task(asyncio.Event().wait())
        try:
            # Longer than the timeout of the next handler, or until the worker stops.
            await asyncio.wait([never], timeout=float(os.environ["CLOCK_SECONDS"]))
        finally:
            (ledger / "over").touch()


    @outbox.handler("greet", timeout=0.5, on_unknown="hold")
    async def greet(message, ctx):
        (ledger / "greet").touch()
"""
# Its attempts are young for a whole test.
LEASE = {"lease_seconds": "60"}


def lose_claim(db: psycopg.Connection, message_id: int) -> None:
    """The new primary does not know the claim, and another worker has the message."""
    with db.transaction():
        db.execute(TAKE_AWAY, [message_id])
        begin(db, message_id, worker="other")


def mail_of(inbox: Inbox) -> dict[str, Any]:
    settings = {name: str(value) for name, value in mail_settings(inbox.port).items()}
    return {**settings, **LEASE, "smtp_connections": "1", "smtp_timeout_seconds": "60"}


async def test_an_email_that_waits_for_its_connection_is_not_sent_if_a_failover_has_lost_its_lease(
    dsn: str, db: psycopg.Connection, start_worker: StartWorker
) -> None:
    async with accepting_server() as inbox:
        inbox.delays = lambda _: not inbox.delayed and not inbox.received
        settings = mail_of(inbox)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            with proxy_to(dsn, listening) as proxy:
                worker = start_worker(MAIL, dsn=proxy.dsn, **settings)
                enqueue(db, destination="mailto:first@example.org")
                await until(lambda: inbox.delayed)
                second = enqueue(db, destination="mailto:second@example.org")
                await until(lambda: row_of(db, second).state == "sending")
        await until(lambda: "the database does not answer" in worker.log)
        lose_claim(db, second)
        inbox.may_go_on.set()
        with socket.create_server(("127.0.0.1", port)) as listening, proxy_to(dsn, listening):
            third = enqueue(db, destination="mailto:third@example.org")
            await until(lambda: row_of(db, third).state == "sent")
    assert [mail.recipients for mail in inbox.received] == [["first@example.org"], ["third@example.org"]]


async def test_a_handler_that_waits_for_a_slot_does_not_begin_if_a_failover_has_lost_its_claim(
    dsn: str, db: psycopg.Connection, start_worker: StartWorker, tmp_path: Path
) -> None:
    """A worker without a free slot asks the database for nothing: only its listener notices."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with proxy_to(dsn, listening) as proxy:
            environment = {"LEDGER": str(tmp_path), "CLOCK_SECONDS": "0"}
            worker = start_worker(APPLICATION, dsn=proxy.dsn, environment=environment, concurrency="1", **LEASE)
            await until(lambda: "worker started" in worker.log)
            with db.transaction():
                enqueue(db, "wait")
                waiting = enqueue(db, "greet")
            await until(lambda: (tmp_path / "wait").exists() and row_of(db, waiting).state == "sending")
    await until(lambda: "listener lost" in worker.log)
    lose_claim(db, waiting)
    os.kill(worker.pid, signal.SIGUSR1)
    with socket.create_server(("127.0.0.1", port)) as listening, proxy_to(dsn, listening):
        last = enqueue(db, "wait")
        await until(lambda: row_of(db, last).state == "sent")
    assert not (tmp_path / "greet").exists()


async def test_a_claim_that_was_answered_before_the_loss_and_begins_after_it_is_in_doubt(
    dsn: str, outbox: Outbox, db: psycopg.Connection, start_worker: StartWorker, tmp_path: Path, connect: Connect
) -> None:
    """The worker reads the content of a fan-out between the answer and the begin."""
    primary = connect(autocommit=True)
    with socket.create_server(("127.0.0.1", 0)) as listening, proxy_to(dsn, listening) as proxy:
        lost: list[int] = []

        def fail_over(_application: str, statement: str) -> None:
            if statement.startswith("SELECT c.id, CASE WHEN octet_length") and not lost:
                lost.append(plain)
                lose_claim(primary, plain)
                proxy.cut_at(1, Moment.BEFORE)

        with db.transaction():
            (fanned,) = outbox.on(db).enqueue_fanout("wait", 1, ["mailto:ada@example.org"], content=1)
            plain = enqueue(db, "greet")
        proxy.on_statement = fail_over
        environment = {"LEDGER": str(tmp_path), "CLOCK_SECONDS": "0"}
        worker = start_worker(APPLICATION, dsn=proxy.dsn, environment=environment, **LEASE)
        await until((tmp_path / "wait").exists)
        os.kill(worker.pid, signal.SIGUSR1)
        await until(lambda: row_of(db, fanned.id).state == "sent")
    assert lost == [plain]
    assert not (tmp_path / "greet").exists()


@pytest.mark.parametrize("how", ["timeout", "stop"])
async def test_an_attempt_that_waits_for_an_answer_about_its_lease_has_not_begun(
    dsn: str, db: psycopg.Connection, start_worker: StartWorker, tmp_path: Path, how: str
) -> None:
    clock_seconds = "1.5" if how == "timeout" else "3600"  # Longer than the timeout of the other handler.
    environment = {"LEDGER": str(tmp_path), "CLOCK_SECONDS": clock_seconds}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with proxy_to(dsn, listening) as proxy:
            settings = {**LEASE, "concurrency": "2", "shutdown_grace_seconds": "0.5"}
            worker = start_worker(APPLICATION, dsn=proxy.dsn, environment=environment, **settings)
            await until(lambda: "worker started" in worker.log)
            with db.transaction():
                enqueue(db, "wait")
                enqueue(db, "clock")
                waiting = enqueue(db, "greet")
            await until(lambda: (tmp_path / "clock").exists() and row_of(db, waiting).state == "sending")
    await until(lambda: "listener lost" in worker.log)
    with socket.create_server(("127.0.0.1", port)) as listening, proxy_to(dsn, listening) as proxy:
        with proxy.stalled():
            os.kill(worker.pid, signal.SIGUSR1)
            await until(lambda: proxy.open_count("pgoutbox ensure"))
            if how == "stop":
                worker.terminate()
            await until((tmp_path / "over").exists)
        await until(lambda: row_of(db, waiting).state != "sending")
    if how == "timeout":
        assert row_of(db, waiting).state == "sent"
    else:
        assert [outcome for _, outcome, _ in attempts_of(db, waiting)] == ["released"]


def are(db: psycopg.Connection, ids: Sequence[int], state: str) -> bool:
    return {row_of(db, message_id).state for message_id in ids} == {state}


async def test_nothing_is_released_in_vain_when_sessions_are_terminated(
    db: psycopg.Connection, start_worker: StartWorker
) -> None:
    async with accepting_server() as inbox:
        inbox.delays = lambda _: True
        worker = start_worker(MAIL, **mail_of(inbox))
        for number in range(1, 3):  # The second time, an idle session that has checked leases ends too.
            inbox.may_go_on.clear()
            ids = [enqueue(db, destination="mailto:ada@example.org")]
            await until(lambda: inbox.delayed)
            ids.append(enqueue(db, destination="mailto:bob@example.org"))
            await until(partial(are, db, ids, "sending"))
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ '^pgoutbox '")
            await until(partial(lambda count: worker.log.count("listener lost") == count, number))
            inbox.may_go_on.set()
            await until(partial(are, db, ids, "sent"))
            assert [attempts_of(db, message_id) for message_id in ids] == [[], []]


async def test_leases_are_renewed_at_once_after_a_lost_connection(
    db: psycopg.Connection, start_worker: StartWorker, tmp_path: Path
) -> None:
    environment = {"LEDGER": str(tmp_path), "CLOCK_SECONDS": "0"}
    worker = start_worker(APPLICATION, environment=environment, lease_seconds="3600")
    message_id = enqueue(db, "wait")
    await until((tmp_path / "wait").exists)
    db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ '^pgoutbox '")
    renewed = "SELECT lease_expires_at > claimed_at + interval '3600 s' FROM pgoutbox.in_flight_view WHERE id = %s"
    await until(lambda: db.execute(renewed, [message_id]).fetchone() == (True,))
    assert worker.log.count("listener lost") == 1
