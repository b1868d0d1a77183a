"""Tests of the pytest plugin: failed messages fail the test, and its databases suit SQLAlchemy and Alembic."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from typing_extensions import Unpack

from pgoutbox import Context, Message, Outbox, Permanent, RetryPolicy, State, Topic, Transient
from pgoutbox.enqueue.producer import EnqueueOptions
from pgoutbox.testing import OutboxDriver, sqlalchemy_url
from pgoutbox.testing.borrowed import borrow, run_pass
from tests.support.outbox_actions import enqueue, rows_of, settings_for
from tests.support.pages import DOCS, blocks_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import URL

    from tests.conftest import Server

pytestmark = pytest.mark.slow

outbox: Final = Outbox()
Failed: Final = AssertionError


@outbox.handler("test.lookup", retry=RetryPolicy.steps(1, max_attempts=2))
async def look_up(message: Message, ctx: Context) -> None:
    message.payload["nope"]


@outbox.handler("test.thread", retry=RetryPolicy.steps(1, max_attempts=1))
def look_up_in_a_thread(message: Message, ctx: object) -> None:
    message.payload["absent"]


@outbox.handler("test.refused")
async def refuse(message: Message, ctx: Context) -> Permanent:
    return Permanent("no such user")


@outbox.handler("test.busy", retry=RetryPolicy.steps(1, max_attempts=2))
async def be_busy(message: Message, ctx: Context) -> None:
    if message.attempt_count == 1:
        raise Transient("busy")


@pytest.fixture
def driver(dsn: str) -> OutboxDriver:
    return OutboxDriver(outbox, dsn)


def put(connection: psycopg.Connection, *topics: str, **options: Unpack[EnqueueOptions]) -> None:
    with connection.transaction():
        for topic in topics:
            outbox.on(connection).enqueue(topic, {}, **options)


# --- failed messages --------------------------------------------------------------------------------------------------


def test_a_failed_message_fails_the_test_with_the_handlers_traceback(
    driver: OutboxDriver, db: psycopg.Connection
) -> None:
    put(db, "test.lookup")
    with pytest.raises(Failed) as raised, driver.expect_raised(KeyError):
        driver.drain()
    told = str(raised.value)
    assert told.startswith("1 message ended failed. If the test expects that, ")
    assert "(test.lookup) failed at attempt 2: KeyError: 'nope'" in told
    assert f'File "{__file__}", line ' in told
    assert 'message.payload["nope"]' in told
    assert "dispatcher.py" not in told


def test_all_failed_messages_of_a_pass_are_named(driver: OutboxDriver, db: psycopg.Connection) -> None:
    put(db, "test.thread", "test.refused")
    with pytest.raises(Failed) as raised:
        driver.run_pass()
    told = str(raised.value)
    assert told.startswith("2 messages ended failed.")
    assert 'message.payload["absent"]' in told
    assert "(test.refused) failed at attempt 1: no such user" in told


def test_a_message_that_failed_before_the_pass_does_not_fail_the_test_again(
    driver: OutboxDriver, db: psycopg.Connection
) -> None:
    put(db, "test.refused")
    with pytest.raises(Failed):
        driver.run_pass()
    driver.run_pass()


def test_a_retried_message_does_not_fail_the_test(driver: OutboxDriver, db: psycopg.Connection) -> None:
    put(db, "test.busy")
    driver.drain()
    assert driver.messages(state=State.SENT)


def test_a_test_may_expect_a_failed_message(driver: OutboxDriver, db: psycopg.Connection) -> None:
    put(db, "test.refused")
    with driver.expect_failed("test.refused", match="no .* user") as failed:
        driver.run_pass()
    assert [(row.topic, row.last_error) for row in failed] == [("test.refused", "no such user")]


@pytest.mark.parametrize(
    ("topic", "match"), [("test.thread", None), (None, "another error"), ("test.refused", "another")]
)
def test_a_message_that_meets_no_expectation_fails_the_test(
    topic: str | None, match: str | None, driver: OutboxDriver, db: psycopg.Connection
) -> None:
    put(db, "test.refused")
    with pytest.raises(Failed, match="1 message ended failed"), driver.expect_failed(topic, match=match):
        driver.run_pass()


def test_an_expectation_that_no_message_meets_fails_the_test(driver: OutboxDriver) -> None:
    with pytest.raises(Failed) as raised, driver.expect_failed("test.refused", match="gone"):
        driver.run_pass()
    assert str(raised.value) == (
        "expect_failed: a message of topic 'test.refused' with an error that matches 'gone' should have ended failed,"
        " but none has"
    )


def test_an_expectation_ends_with_its_block(driver: OutboxDriver, db: psycopg.Connection) -> None:
    put(db, "test.refused")
    with driver.expect_failed():
        driver.run_pass()
    put(db, "test.refused")
    with pytest.raises(Failed, match="1 message ended failed"):
        driver.run_pass()


# --- clear ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    ["SET database_id = 1", "SET server_id = 1", "SET deployment = 'production'", None],
)
def test_the_driver_delivers_in_a_copy(driver: OutboxDriver, db: psycopg.Connection, change: str | None) -> None:
    db.execute(b"DELETE FROM pgoutbox.home" if change is None else f"UPDATE pgoutbox.home {change}".encode())
    put(db, "test.busy")
    driver.drain()
    assert [row.state for row in driver.messages()] == [State.SENT]


def test_clear_deletes_messages_of_every_state_with_their_keys(driver: OutboxDriver, db: psycopg.Connection) -> None:
    everything: EnqueueOptions = {"dedupe_key": "d", "coalesce_key": "c", "destination": "mailto:ada@example.org"}
    put(db, "test.busy", **everything)
    driver.run_pass()
    put(db, "test.refused", "test.lookup")
    with driver.expect_failed("test.refused"), driver.expect_raised():
        driver.run_pass()
    driver.answer_with(lambda _: Permanent("refused"))
    driver.clear()
    assert driver.messages() == []
    assert driver.deliveries == []
    put(db, "test.busy", **everything)
    driver.drain()
    assert [(row.state, row.attempt_count) for row in driver.messages()] == [(State.SENT, 2)]
    db.rollback()
    left = "SELECT count(*) FROM pgoutbox.{}"
    with db.transaction():
        driver.clear()
        tables = ("message", "dedupe", "key_head", "content", "breaker")
        counts = {table: db.execute(left.format(table).encode()).fetchone() for table in tables}
    assert set(counts.values()) == {(0,)}


# --- a borrowed connection --------------------------------------------------------------------------------------------


async def test_a_pass_on_a_borrowed_connection_delivers_later_versions(dsn: str, db: psycopg.Connection) -> None:
    """Django's test cases lend theirs."""
    versions = Outbox(settings_for(dsn))
    seen: list[int] = []

    @versions.handler(Topic("test.version", version=3, upgrade=dict.fromkeys((1, 2), lambda payload: payload)))
    async def deliver(message: Message, ctx: Context) -> None:
        seen.append(message.payload_version)

    with db.transaction(force_rollback=True):
        ids = [enqueue(db, "test.version", payload_version=version) for version in (1, 2, 3, 4)]
        with ThreadPoolExecutor(1) as threads:
            await run_pass(
                borrow(db),
                versions,
                versions.settings,
                queues=["default"],
                transports={},
                middlewares=(),
                threads=threads,
            )
        assert [row.state for row in rows_of(db, *ids)] == ["sent", "sent", "sent", "pending"]
    assert sorted(seen) == [1, 2, 3]


# --- SQLAlchemy -------------------------------------------------------------------------------------------------------


def test_the_url_opens_the_database_of_the_test(pgoutbox_url: URL, pgoutbox_dsn: str) -> None:
    engine = create_engine(pgoutbox_url, poolclass=NullPool)
    with psycopg.connect(pgoutbox_dsn) as connection, engine.connect() as by_engine:
        assert by_engine.scalar(text("SELECT current_database()")) == connection.info.dbname
        assert by_engine.scalar(text("SELECT max(number) FROM pgoutbox.revision")) is not None


async def test_the_url_serves_async_engines_of_both_drivers(pgoutbox_url: URL) -> None:
    for name in ("postgresql+psycopg", "postgresql+asyncpg"):
        engine = create_async_engine(pgoutbox_url.set(drivername=name), poolclass=NullPool)
        async with engine.connect() as connection:
            assert (await connection.execute(text("SELECT current_database()"))).scalar() == pgoutbox_url.database


@pytest.mark.parametrize(
    ("dsn", "url"),
    [
        ("dbname=club user=ada password='p @/%'", "postgresql+psycopg://ada:p %40%2F%25@/club"),
        ("host=/run/pg port=5433 dbname=club", "postgresql+psycopg:///club?host=%2Frun%2Fpg&port=5433"),
        ("postgresql://ada@a,b/club?sslmode=require", "postgresql+psycopg://ada@/club?host=a%2Cb&sslmode=require"),
    ],
)
def test_a_connection_string_becomes_a_url(dsn: str, url: str) -> None:
    made = sqlalchemy_url(dsn)
    assert made.render_as_string(hide_password=False) == url
    assert make_url(url) == made


# --- whole test runs --------------------------------------------------------------------------------------------------

RETRIED: Final = """
import psycopg
from pgoutbox import Context, Message, Outbox, Transient

outbox = Outbox()

@outbox.handler("test.retried")
async def handle(message: Message, ctx: Context) -> None:
    raise Transient("busy")

def test_it(pgoutbox_driver, pgoutbox_dsn):
    driver = pgoutbox_driver(outbox)
    with psycopg.connect(pgoutbox_dsn) as connection:
        outbox.on(connection).enqueue("test.retried", {})
    driver.run_pass()
    driver.deliveries[0]
"""


@pytest.fixture
def run_tests(tmp_path: Path, server: Server) -> Callable[..., str]:
    """Write a test module, and run pytest on it with the plugin and the server of this session."""

    def run(module: str, *, outcome: str) -> str:
        (tmp_path / "test_it.py").write_text(module)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
            cwd=tmp_path,
            env={"PGOUTBOX_TEST_DSN": server.dsn_for("postgres"), "PYTHONPATH": str(DOCS.parent), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert outcome in done.stdout, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_failed_test_shows_the_outcomes_that_handlers_raised(run_tests: Callable[..., str]) -> None:
    output = run_tests(RETRIED, outcome="1 failed")
    shown = output.partition("outcomes that pgoutbox handlers raised")[2]
    assert 'raise Transient("busy")' in shown


ENV: Final = """
from alembic import context
from sqlalchemy import create_engine

kept_open = create_engine(context.config.get_main_option("sqlalchemy.url")).connect()
context.configure(connection=kept_open)
with context.begin_transaction():
    context.run_migrations()
kept_open.commit()
"""
REVISION: Final = """
from alembic import op

revision = "4f1c2a"
down_revision = None
depends_on = "pgoutbox_0001"

def upgrade():
    op.execute("CREATE TABLE member (email text PRIMARY KEY)")
"""
OF_THE_APPLICATION: Final = """
import psycopg

def test_both_histories_are_in_each_database(pgoutbox_dsn):
    with psycopg.connect(pgoutbox_dsn) as connection:
        connection.execute("INSERT INTO member (email) VALUES ('ada@example.org')")
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("4f1c2a",)
        connection.execute("SELECT pgoutbox.enqueue('mail.welcome', '{}')")

def test_each_test_has_a_new_database(pgoutbox_dsn):
    with psycopg.connect(pgoutbox_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM member").fetchone() == (0,)
"""


def test_the_recipe_migrates_by_the_applications_own_history(tmp_path: Path, run_tests: Callable[..., str]) -> None:
    """The environment of the application leaves a connection open, as an engine with a pool does."""
    (recipe,) = [b for b in blocks_of(DOCS / "how-to/testing.md", "python") if "def pgoutbox_migrate" in b.text]
    ini = blocks_of(DOCS / "how-to/migrations.md", "ini")[0]
    versions = tmp_path / "migrations" / "versions"
    versions.mkdir(parents=True)
    (tmp_path / "alembic.ini").write_text(ini.text)
    (versions.parent / "env.py").write_text(ENV)
    (versions / "4f1c2a_members.py").write_text(REVISION)
    (tmp_path / "conftest.py").write_text(recipe.text)
    run_tests(OF_THE_APPLICATION, outcome="2 passed")
