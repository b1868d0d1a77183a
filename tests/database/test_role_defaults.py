"""Tests that pgoutbox's own connections work under any defaults of the role, the database or the environment."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC
from typing import TYPE_CHECKING, Final

import httpx
import psycopg
import pytest
from psycopg import sql as composable
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb

from pgoutbox import Enqueued, Message, NewMessage, Outbox, migrate
from pgoutbox.cli.main import main
from pgoutbox.dashboard import create_app
from pgoutbox.doctor import Level, examine
from pgoutbox.errors import ConfigurationError
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.message import State
from pgoutbox.settings import load_settings
from pgoutbox.worker import Worker
from tests.support.messages import put
from tests.support.missing import setting_of_old_servers
from tests.support.outbox_actions import enqueue, row_of, rows_of, running, settings_for
from tests.support.roles import ROLES, login
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, until
from tests.support.web_server import VIEWER_TOKEN, serving, web_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


UNSPEAKABLE: Final = "5 € 🎉"  # LATIN1 has neither character.
# Each value of each setting. Those that exclude each other are in different sets.
HOSTILE: Final = {
    "German dates": {
        "datestyle": "German, DMY",
        "intervalstyle": "sql_standard",
        "timezone": "<+03:30>-03:30",
        "bytea_output": "escape",
        "extra_float_digits": "-15",
        "client_encoding": "LATIN1",
        "standard_conforming_strings": "off",
        "default_transaction_isolation": "repeatable read",
    },
    "SQL dates": {"datestyle": "SQL", "intervalstyle": "iso_8601", "client_encoding": "SQL_ASCII"},
    "Postgres dates": {"datestyle": "Postgres, MDY"},
}


@contextmanager
def login_with(dsn: str, *roles: str, **defaults: str) -> Iterator[str]:
    """Return the DSN of a new login role whose sessions begin with these settings."""
    with login(dsn, *roles) as own_dsn, psycopg.connect(dsn, autocommit=True) as superuser:
        role = composable.Identifier(str(conninfo_to_dict(own_dsn)["user"]))
        for name, value in defaults.items():
            statement = composable.SQL("ALTER ROLE {} SET {} = {}")
            with setting_of_old_servers():
                superuser.execute(statement.format(role, composable.Identifier(name), composable.Literal(value)))
        yield own_dsn


@pytest.fixture(params=["of the role", "of the environment"])
def latin_dsn(request: pytest.FixtureRequest, dsn: str, db: psycopg.Connection) -> Iterator[str]:
    """Return a DSN whose sessions use LATIN1 unless they request another encoding. The test's own session is already
    open."""
    with login_with(dsn, *ROLES, client_encoding="LATIN1") as own_dsn, pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "of the environment":
            monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
            yield dsn
        else:
            yield own_dsn


async def test_a_worker_reads_times_in_utc(dsn: str, db: psycopg.Connection) -> None:
    with login_with(dsn, *ROLES, timezone="Europe/Berlin") as own_dsn:
        outbox = Outbox(settings_for(own_dsn))
        zones: list[object] = []

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            zones.extend([message.created_at.tzinfo, message.available_at.tzinfo])

        enqueue(db)
        await Worker(outbox).run_once()
    assert zones == [UTC, UTC], "the driver reads times of other zones three times as slowly"


async def test_a_worker_delivers_text_outside_the_default_encoding_of_its_sessions(
    latin_dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(latin_dsn))
    got: list[object] = []

    @outbox.handler("plain")
    async def plain(message: Message, ctx: Context) -> None:
        got.append(message.payload)

    @outbox.handler("written", transactional=True)
    async def written(message: Message, ctx: Context) -> None:
        cursor = await ctx.connection.execute("SELECT %s::text", [message.payload])
        got.append((await cursor.fetchone() or ("",))[0])

    @outbox.handler("threaded", transactional=True)
    def threaded(message: Message, ctx: SyncContext) -> None:
        got.append((ctx.connection.execute("SELECT %s::text", [message.payload]).fetchone() or ("",))[0])

    ids = [enqueue(db, topic, UNSPEAKABLE) for topic in ("plain", "written", "threaded")]
    async with running(Worker(outbox)):
        await until(lambda: all(row.is_finished for row in rows_of(db, *ids)))
    assert {row.state for row in rows_of(db, *ids)} == {State.SENT}
    assert got == [UNSPEAKABLE] * 3


def test_an_enqueue_on_a_latin1_connection_names_the_encoding_that_lacks_a_character(dsn: str) -> None:
    outbox = Outbox(settings_for(dsn))
    with psycopg.connect(dsn, client_encoding="LATIN1") as connection:
        with pytest.raises(ConfigurationError, match=r"client_encoding: .* lacks '\\u20ac'.* UTF8"):
            outbox.on(connection).enqueue("greet", UNSPEAKABLE)
        outbox.on(connection).enqueue("greet", "für alle")
        assert connection.execute("SELECT payload #>> '{}' FROM pgoutbox.message").fetchall() == [("für alle",)]


def test_an_enqueue_on_a_connection_without_an_encoding_writes_utf8(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))
    with psycopg.connect(dsn, client_encoding="SQL_ASCII") as connection:
        enqueued = outbox.on(connection).enqueue("greet", UNSPEAKABLE, dedupe_key="once")
        again = outbox.on(connection).enqueue("greet", UNSPEAKABLE, dedupe_key="once")
        bulk = outbox.on(connection).enqueue_many([NewMessage("greet", UNSPEAKABLE, dedupe_key="once")])
    assert again == Enqueued(enqueued.id, True)
    assert bulk == [again]
    assert db.execute("SELECT payload #>> '{}' FROM pgoutbox.message").fetchall() == [(UNSPEAKABLE,)]


def put_unspeakable(db: psycopg.Connection) -> int:
    """Create a failed message with a payload and an error that need UTF-8."""
    message_id = put(db, State.FAILED)
    values = [Jsonb(UNSPEAKABLE), UNSPEAKABLE, message_id]
    db.execute("UPDATE pgoutbox.message SET payload = %s, last_error = %s WHERE id = %s", values)
    return message_id


@pytest.mark.parametrize("name", ["German dates", "SQL dates"])
def test_no_default_of_a_role_affects_the_doctor(dsn: str, db: psycopg.Connection, name: str) -> None:
    put_unspeakable(db)
    with login_with(dsn, *ROLES, **HOSTILE[name]) as own_dsn, login(dsn, *ROLES) as plain_dsn:
        assert levels(own_dsn) == levels(plain_dsn)


def levels(dsn: str) -> dict[str, Level]:
    """Return the doctor's findings by check."""
    return {finding.check: finding.level for finding in examine(load_settings(dsn=dsn))}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_default_of_a_role_affects_operator_commands(
    dsn: str, db: psycopg.Connection, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    message_id = put_unspeakable(db)
    with login_with(dsn, *ROLES, **HOSTILE[name]) as own_dsn:
        monkeypatch.setenv("PGOUTBOX_DSN", own_dsn)
        for command in (
            ["list"], ["show", str(message_id)], ["workers"], ["stats"], ["queues"], ["audit"], ["retention"],
            ["redrive", str(message_id)],
        ):  # fmt: skip
            assert main(command) == 0, capsys.readouterr().err
    assert row_of(db, message_id).state == State.PENDING


@pytest.mark.parametrize("name", HOSTILE)
def test_no_default_of_a_role_affects_the_dashboard(dsn: str, db: psycopg.Connection, name: str) -> None:
    message_id = put_unspeakable(db)
    with login_with(dsn, *ROLES, **HOSTILE[name]) as own_dsn:
        settings = web_settings(dsn=own_dsn)
        headers = {"Authorization": f"Bearer {VIEWER_TOKEN}", "Accept": "text/html"}
        with (
            serving(create_app(settings, settings=settings), settings) as url,
            httpx.Client(base_url=url, headers=headers, timeout=PROCESS_PATIENCE_SECONDS, verify=False) as vera,
        ):
            for path in ("/", "/messages", f"/messages/{message_id}", "/failed", "/queues"):
                answer = vera.get(path)
                assert answer.status_code == 200, (path, answer.text[-500:])


@pytest.mark.parametrize("name", HOSTILE)
def test_no_default_of_a_database_affects_a_migration(empty_dsn: str, name: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as superuser:
        database = composable.Identifier(superuser.info.dbname)
        for setting, value in HOSTILE[name].items():
            statement = composable.SQL("ALTER DATABASE {} SET {} = {}")
            with setting_of_old_servers():
                superuser.execute(statement.format(database, composable.Identifier(setting), composable.Literal(value)))
    migrate.upgrade(empty_dsn)
    assert migrate.current(empty_dsn) == migrate.head()


def test_a_session_that_reads_null_in_arrays_as_a_text_enqueues_bulks(dsn: str, db: psycopg.Connection) -> None:
    """Arrays of values would get the key NULL for the messages without one."""
    outbox = Outbox(settings_for(dsn))
    with login_with(dsn, *ROLES, array_nulls="off") as own_dsn, psycopg.connect(own_dsn) as connection:
        outbox.on(connection).enqueue_many([NewMessage("greet", 1, dedupe_key="k"), NewMessage("greet", 2)])
        outbox.on(connection).enqueue_fanout("greet", 3, ["a:1", "a:2"])
    rows = db.execute("SELECT payload, dedupe_key, owner FROM pgoutbox.message ORDER BY payload").fetchall()
    assert rows == [(1, "k", None), (2, None, None), (3, None, None), (3, None, None)]
