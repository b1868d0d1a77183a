"""Tests real workers with production's mail settings in each kind of copy, and after each kind of failover.

A copy sends nothing until somebody adopts it. A database that is not a copy goes on sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
import psycopg
import pytest

from tests.support.command_line import Done
from tests.support.forks import run_command
from tests.support.outbox_actions import enqueue, row_of
from tests.support.pages import DOCS, blocks_of
from tests.support.pooler import pooled
from tests.support.servers import DATABASE, OwnServer, Workshop, open_workshop
from tests.support.smtp_server import Inbox, accepting_server, mail_settings
from tests.support.waiting import until
from tests.support.worker_process import WorkerProcess, environment_with

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.conftest import Server

APP: Final = "tests.support.mail_app:outbox"
HELD: Final = "error: workers send nothing from this database: the schema pgoutbox "
(SET_SEQUENCES, _) = [block.text for block in blocks_of(DOCS / "how-to" / "restore-clone-failover.md", "sql")]
NEXT_STEP: Final = ". To send from it, run: pgoutbox adopt\n"


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    """Make servers that only these tests use."""
    with open_workshop(os.environ) as opened:
        yield opened


@pytest.fixture
def production(workshop: Workshop) -> Iterator[OwnServer]:
    """Run a server with one pending mail to a real person."""
    with workshop.server() as server:
        server.start()
        with server.connect() as db:
            enqueue(db, "mail", destination="mailto:ada@example.org")
        yield server


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    """Run production's mail server."""
    async with accepting_server() as inbox:
        yield inbox


def mailing(inbox: Inbox, **settings: str) -> dict[str, str]:
    """Return the settings of production's mail."""
    told = mail_settings(inbox.port) | {"smtp_sender": "club@club.test"}
    return {name: str(value) for name, value in told.items()} | settings


async def run(dsn: str, *arguments: str, **settings: str) -> Done:
    """Run a command beside the mail server of this event loop."""
    command = ("-m", "pgoutbox", *arguments)
    environment = environment_with(dsn=dsn, **settings)
    done = await asyncio.to_thread(run_command, *command, cwd=Path.cwd(), env=environment)
    return Done(done.returncode, done.stdout, done.stderr)


async def run_once(dsn: str, inbox: Inbox, **settings: str) -> Done:
    return await run(dsn, "worker", "--once", "--app", APP, **mailing(inbox, **settings))


async def assert_held(dsn: str, inbox: Inbox, reason: str, **settings: str) -> None:
    """Assert that a worker sends nothing, claims nothing, and names the reason and the next step."""
    before = len(inbox.received)
    done = await run_once(dsn, inbox, **settings)
    assert (done.exit_code, done.out) == (1, "")
    assert done.err.startswith(HELD + reason)
    assert done.err.endswith(NEXT_STEP)
    assert len(inbox.received) == before
    with psycopg.connect(dsn) as db:
        assert db.execute("SELECT state, attempt_count, worker FROM pgoutbox.message").fetchall() == [
            ("pending", 0, None)
        ]


async def assert_sends(dsn: str, inbox: Inbox, **settings: str) -> None:
    """Assert that a worker sends the one mail."""
    before = len(inbox.received)
    done = await run_once(dsn, inbox, **settings)
    assert (done.exit_code, done.out, done.err) == (0, "", "")
    assert len(inbox.received) == before + 1


async def adopt(dsn: str, **settings: str) -> Done:
    done = await run(dsn, "adopt", "--yes", **settings)
    assert (done.exit_code, done.err) == (0, "")
    return done


def copy_dump(workshop: Workshop, source: OwnServer, target: OwnServer, *options: str) -> None:
    """Restore a dump of the database on another server, as its superuser."""
    dump = source.home / "dump"
    dumped = workshop.run("pg_dump", "-Fc", *options, "-f", str(dump), source.dsn)
    assert dumped.returncode == 0, dumped.stdout
    restored = workshop.run("pg_restore", "--no-owner", "--no-acl", "-d", target.dsn, str(dump))
    assert restored.returncode == 0, restored.stdout


# --- copies -----------------------------------------------------------------------------------------------------------


async def test_a_database_made_from_a_template_sends_nothing_until_it_is_adopted(
    production: OwnServer, inbox: Inbox
) -> None:
    with production.connect("postgres") as db:
        db.execute(f"CREATE DATABASE staging TEMPLATE {DATABASE}".encode())
    staging = production.dsn_for("staging")
    await assert_held(staging, inbox, f"belongs to database {DATABASE} of server ")
    assert (await run(staging, "migrate")).exit_code == 0
    await assert_held(staging, inbox, f"belongs to database {DATABASE} of server ")  # A migration does not adopt.
    assert "1 due message, 0 in flight" in (await adopt(staging)).out
    await assert_sends(staging, inbox)
    await assert_sends(production.dsn, inbox)  # The receiver gets it twice, as the page says.


async def test_a_dump_restored_on_another_server_sends_nothing_until_it_is_adopted(
    workshop: Workshop, production: OwnServer, inbox: Inbox
) -> None:
    with workshop.empty_server() as other:
        other.start()
        with other.connect("postgres") as db:
            db.execute(f"CREATE DATABASE {DATABASE} TEMPLATE template0".encode())
        copy_dump(workshop, production, other)
        assert (await run(other.dsn, "migrate")).exit_code == 0
        await assert_held(other.dsn, inbox, f"belongs to database {DATABASE} of server ")
        await adopt(other.dsn)
        await assert_sends(other.dsn, inbox)


async def test_an_upgraded_server_sends_after_one_command(
    workshop: Workshop, production: OwnServer, inbox: Inbox
) -> None:
    production.stop()
    with workshop.empty_server() as upgraded:
        binaries = str(workshop.binaries)
        words = ("-b", binaries, "-B", binaries, "-d", str(production.data), "-D", str(upgraded.data))
        options = ("-U", "postgres", "--no-sync", "-s", str(upgraded.home))
        done = workshop.run("pg_upgrade", *words, *options, directory=upgraded.home)
        assert done.returncode == 0, done.stdout
        upgraded.start()
        await assert_held(upgraded.dsn, inbox, f"belongs to database {DATABASE} of server ")
        await adopt(upgraded.dsn)
        await assert_sends(upgraded.dsn, inbox)


async def test_a_logical_replica_sends_nothing_until_it_is_adopted(
    workshop: Workshop, production: OwnServer, inbox: Inbox
) -> None:
    production.stop()
    production.start(wal_level="logical")
    with production.connect() as db:
        db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    with workshop.empty_server() as replica:
        replica.start()
        with replica.connect("postgres") as db:
            db.execute(f"CREATE DATABASE {DATABASE} TEMPLATE template0".encode())
        copy_dump(workshop, production, replica, "--schema-only")
        with replica.connect() as db:
            source = f"host={production.home} port=5432 user=postgres dbname={DATABASE}"
            db.execute(f"CREATE SUBSCRIPTION everything CONNECTION '{source}' PUBLICATION everything".encode())
            unready = "SELECT FROM pg_subscription_rel WHERE srsubstate <> 'r'"
            await until(lambda: db.execute(unready).fetchall() == [])
            await assert_held(replica.dsn, inbox, f"belongs to database {DATABASE} of server ")
            db.execute("DROP SUBSCRIPTION everything")
            db.execute(SET_SEQUENCES.encode())
        await adopt(replica.dsn)
        await assert_sends(replica.dsn, inbox)


async def test_a_schema_without_its_home_sends_nothing(production: OwnServer, inbox: Inbox) -> None:
    with production.connect() as db:
        db.execute("DELETE FROM pgoutbox.home")
    await assert_held(production.dsn, inbox, "does not record the database that it belongs to")
    await adopt(production.dsn)
    await assert_sends(production.dsn, inbox)


async def test_a_cloned_volume_is_told_by_the_name_of_the_deployment_only(
    workshop: Workshop, production: OwnServer, inbox: Inbox
) -> None:
    await adopt(production.dsn, deployment="production")
    production.stop()
    with workshop.clone_of(production) as nameless, workshop.clone_of(production) as clone:
        production.start()
        clone.start()
        reason = "belongs to deployment production, and PGOUTBOX_DEPLOYMENT is "
        await assert_held(clone.dsn, inbox, f"{reason}staging", deployment="staging")
        await assert_held(clone.dsn, inbox, f"{reason}not set")
        await assert_sends(production.dsn, inbox, deployment="production")
        await assert_sends(clone.dsn, inbox, deployment="production")  # It has all settings of production.
        nameless.start()
        await adopt(nameless.dsn)
        await assert_sends(nameless.dsn, inbox, deployment="staging")  # No name is recorded.


async def test_a_worker_behind_a_pooler_sends_nothing_from_a_copy(dsn: str, server: Server, inbox: Inbox) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pooled(dsn, server, mode="transaction", size=1) as pooled_dsn:
        enqueue(db, "mail", destination="mailto:ada@example.org")
        db.execute("UPDATE pgoutbox.home SET database_id = 1")
        await assert_held(pooled_dsn, inbox, "belongs to database ")
        await adopt(pooled_dsn)
        await assert_sends(pooled_dsn, inbox)


# --- no copies --------------------------------------------------------------------------------------------------------


async def test_a_promoted_standby_sends(workshop: Workshop, production: OwnServer, inbox: Inbox) -> None:
    with workshop.standby_of(production, "heir") as heir:
        heir.start()
        production.stop("immediate")
        heir.promote()
        await assert_sends(heir.dsn, inbox)


async def test_a_restore_in_place_sends_again_what_was_pending_then(
    workshop: Workshop, production: OwnServer, inbox: Inbox
) -> None:
    production.stop()
    with workshop.clone_of(production) as backup:
        production.start()
        await assert_sends(production.dsn, inbox)
        production.stop()
        shutil.rmtree(production.data)
        shutil.copytree(backup.data, production.data, symlinks=True)
        workshop.give(production.data)
        production.start()
        await assert_sends(production.dsn, inbox)


async def test_a_renamed_database_sends(production: OwnServer, inbox: Inbox) -> None:
    with production.connect("postgres") as db:
        db.execute(f"ALTER DATABASE {DATABASE} RENAME TO renamed".encode())
    await assert_sends(production.dsn_for("renamed"), inbox)


async def test_an_owner_that_may_not_read_the_identifier_sends(production: OwnServer, inbox: Inbox) -> None:
    with production.connect() as db:
        db.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        await assert_sends(production.dsn, inbox)
        db.execute("SELECT pgoutbox.adopt()")
        assert db.execute("SELECT server_id, is_here FROM pgoutbox.home_view").fetchall() == [(None, True)]


# --- a worker that stays up -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def working(dsn: str, inbox: Inbox, folder: Path, **settings: str) -> Iterator[WorkerProcess]:
    told = mailing(inbox, dsn=dsn, metrics_address="127.0.0.1:0", poll_interval_seconds="1", **settings)
    worker = WorkerProcess(APP, log=folder / "worker.log", settings=told)
    try:
        yield worker
    finally:
        worker.end()


async def page_of(worker: WorkerProcess, path: str) -> httpx.Response:
    await until(lambda: "metrics_served" in worker.events())
    (address,) = {record["address"] for record in worker.records("metrics_served")}
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://{address}{path}")


async def test_a_running_worker_waits_in_a_copy_and_sends_once_it_is_adopted(
    dsn: str, db: psycopg.Connection, inbox: Inbox, tmp_path: Path
) -> None:
    message_id = enqueue(db, "mail", destination="mailto:ada@example.org")
    db.execute("UPDATE pgoutbox.home SET database_id = 1")
    with working(dsn, inbox, tmp_path) as worker:
        await until(lambda: "held_in_copy" in worker.events())
        page = await page_of(worker, "/readyz")
        assert (page.status_code, page.text) == (
            503,
            "the database is a copy, nothing is claimed: see `pgoutbox doctor` and `pgoutbox adopt`\n",
        )
        assert "pgoutbox_held_in_copy 1.0" in (await page_of(worker, "/metrics")).text
        assert (await page_of(worker, "/livez")).status_code == 200
        assert row_of(db, message_id).attempt_count == 0
        assert db.execute("SELECT count(*) FROM pgoutbox.worker").fetchall() == [(0,)]
        await adopt(dsn)
        await until(lambda: len(inbox.received) == 1)
        await until(lambda: row_of(db, message_id).state == "sent")
        assert "pgoutbox_held_in_copy 0.0" in (await page_of(worker, "/metrics")).text
        assert worker.events("ERROR") == ["held_in_copy"]
        assert worker.stop() == 0


async def test_a_running_worker_that_reconnects_to_a_copy_holds_and_writes_nothing(
    workshop: Workshop, production: OwnServer, inbox: Inbox, tmp_path: Path
) -> None:
    inbox.delays = lambda _: True
    with workshop.server() as other:
        other.start()
        with other.connect() as copy:
            copy.execute("UPDATE pgoutbox.home SET server_id = 1")
            message_id = enqueue(copy, "mail", destination="mailto:ada@example.org")
            hosts = f"{production.home},{other.home}"
            dsn = f"host={hosts} port=5432,5432 user=postgres dbname={DATABASE}"
            with working(dsn, inbox, tmp_path) as worker:
                await until(lambda: len(inbox.delayed) == 1)
                production.stop("immediate")
                await until(lambda: "held_in_copy" in worker.events())
                inbox.may_go_on.set()
                assert (await page_of(worker, "/readyz")).status_code == 503
                production.start()
                await until(lambda: "copy_adopted" in worker.events())
                row = row_of(copy, message_id)
                assert (row.state, row.attempt_count) == ("pending", 0)
                assert len(inbox.received) == 1
                with production.connect() as db:
                    await until(
                        lambda: (
                            db.execute("SELECT state, attempt_count FROM pgoutbox.message").fetchall() == [("sent", 1)]
                        )
                    )
