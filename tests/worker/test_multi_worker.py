"""The worker of several databases in the test's process: it can run again, and follows its list at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import pytest
from pydantic import SecretStr

from pgoutbox import Context, Message, Outbox, Outcome, Sent, Transient
from pgoutbox.errors import PgOutboxError
from pgoutbox.observability.events import LogEvent
from pgoutbox.worker import multi_worker
from pgoutbox.worker.multi_worker import MultiWorker
from tests.support.outbox_actions import enqueue, row_of, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pgoutbox.transports import Content, Transport
    from tests.conftest import Server


def outbox_of(
    file: Path, handled: list[str | None], *, transports: Sequence[Transport] = (), **settings: object
) -> Outbox:
    """Return an outbox for the databases in this file, which notes the database of each message."""
    only_told = {"dsn": None, "dsns": SecretStr(str(file)), "poll_interval_seconds": 3600}
    outbox = Outbox(settings_for("dbname=unused", **settings).model_copy(update=only_told), transports=transports)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handled.append(message.database)

    return outbox


def databases_of(worker: MultiWorker) -> list[str]:
    """Return the databases that are served."""
    return sorted(name for name, status in worker.status().databases.items() if status.is_started)


async def test_one_worker_can_run_again(dsn: str, db: psycopg.Connection, tmp_path: Path) -> None:
    handled: list[str | None] = []
    file = tmp_path / "databases"
    file.write_text(f"one {dsn}\n")
    worker = MultiWorker(outbox_of(file, handled))
    for count in (1, 2):
        enqueue(db)
        await worker.run_once()
        assert handled == ["one"] * count


async def test_a_name_with_another_dsn_is_served_there_when_the_former_one_has_ended(
    dsn: str,
    db: psycopg.Connection,
    server: Server,
    template_of_today: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multi_worker, "_READ_SECONDS", 3600.0)
    handled: list[str | None] = []
    file = tmp_path / "databases"
    file.write_text(f"one {dsn}\n")
    worker = MultiWorker(outbox_of(file, handled))
    with server.database(template=template_of_today()) as other:
        running = asyncio.create_task(worker.run())
        enqueue(db)
        await until(lambda: handled == ["one"])
        file.write_text(f"one {server.dsn_for(other)}\n")
        with psycopg.connect(server.dsn_for(other), autocommit=True) as session:
            enqueue(session)
        worker.read_databases()
        await until(lambda: handled == ["one", "one"])
        worker.stop()
        await running


class Post:
    """A transport that can be closed."""

    schemes = ("postcard",)
    is_closed = False

    async def send(self, message: Message[object], content: Content) -> Outcome:
        return Transient("closed") if self.is_closed else Sent()

    async def aclose(self) -> None:
        self.is_closed = True


@dataclass(frozen=True)
class Postcard:
    scheme: str = "postcard"


async def test_the_end_of_one_database_closes_no_transport_of_another(
    dsn: str, db: psycopg.Connection, server: Server, template_of_today: Callable[[], str], tmp_path: Path
) -> None:
    post = Post()
    file = tmp_path / "databases"
    outbox = outbox_of(file, [], transports=[post])

    @outbox.handler("write")
    async def write(message: Message, ctx: Context) -> Content:
        return Postcard()

    with server.database(template=template_of_today()) as other:
        file.write_text(f"one {dsn}\ntwo {server.dsn_for(other)}\n")
        worker = MultiWorker(outbox)
        running = asyncio.create_task(worker.run())
        await until(lambda: databases_of(worker) == ["one", "two"])
        file.write_text(f"one {dsn}\n")
        worker.read_databases()
        await until(lambda: databases_of(worker) == ["one"])
        message_id = enqueue(db, topic="write")
        await until(lambda: row_of(db, message_id).attempt_count == 1 and row_of(db, message_id).state != "sending")
        assert row_of(db, message_id).state == "sent"
        worker.stop()
        await running
    assert post.is_closed


async def test_a_slow_claim_on_the_session_that_listens_is_waited_for(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    """A listener must answer within its own limit; a statement may take longer."""
    db.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1.5); RETURN NEW; END'"
    )
    db.execute("CREATE TRIGGER wait AFTER INSERT ON pgoutbox.claim FOR EACH ROW EXECUTE FUNCTION wait()")
    file = tmp_path / "databases"
    file.write_text(f"one {dsn}\n")
    handled: list[str | None] = []
    worker = MultiWorker(outbox_of(file, handled, listener_heartbeat_timeout_seconds=1))
    running = asyncio.create_task(worker.run())
    enqueue(db)
    await until(lambda: handled == ["one"])
    # A claim that is given up is repeated, with success.
    assert worker._members["one"].worker.telemetry.counts[LogEvent.CLAIM_LOST] == 0
    worker.stop()
    await running


async def test_a_defect_in_one_database_is_logged_with_its_place(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def trip(*_: object) -> None:
        raise NameError("no such name")

    monkeypatch.setattr("pgoutbox.database.worker_connection.WorkerConnection.trip", trip)
    file = tmp_path / "databases"
    file.write_text(f"one {dsn}\n")
    with pytest.raises(PgOutboxError, match="one"):
        await MultiWorker(outbox_of(file, [])).run_once()
    (left_out,) = [record for record in caplog.records if "this database is not served" in record.getMessage()]
    assert left_out.exc_text is not None
    assert "in trip" in left_out.exc_text
