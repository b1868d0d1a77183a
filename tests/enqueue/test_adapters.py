"""Tests that every supported kind of connection has the same contract."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import asyncpg
import django
import django.conf
import django.db
import psycopg
import pytest
import sqlalchemy
import sqlalchemy.exc
from django.db import transaction as django_transaction
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.pool import NullPool

from pgoutbox import (
    ArgumentError,
    AsyncProducer,
    CancelResult,
    DedupeConflictError,
    EditResult,
    Enqueued,
    NewMessage,
    Outbox,
    Producer,
    SchemaError,
    State,
    TransactionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.conftest import AsyncConnect, Connect

DJANGO_ALIAS = "outbox"


@dataclass
class Caller:
    """A connection of some kind, in its own transaction or in autocommit mode.

    `run` returns the result of a call of the producer, after awaiting it if it is a coroutine.
    """

    connection: Any
    is_async: bool
    run: Callable[[Any], Any]
    execute: Callable[[str], object]
    commit: Callable[[], object]
    rollback: Callable[[], object]
    close: Callable[[], object] | None
    driver_error: type[Exception]
    outbox: Outbox = field(default_factory=Outbox)

    @property
    def producer(self) -> Any:  # noqa: ANN401 - of either kind
        return self.outbox.on(self.connection)

    def enqueue(self, topic: str, payload: object, **options: object) -> Enqueued | None:
        return cast("Enqueued | None", self.run(self.producer.enqueue(topic, payload, **options)))

    def enqueue_many(self, items: Iterable[NewMessage[Any]], **options: object) -> list[Enqueued]:
        return cast("list[Enqueued]", self.run(self.producer.enqueue_many(items, **options)))

    def cancel(self, message_id: int | None = None, **options: object) -> CancelResult:
        return cast("CancelResult", self.run(self.producer.cancel(message_id, **options)))


@contextlib.contextmanager
def psycopg_connection(dsn: str, *, autocommit: bool) -> Iterator[Caller]:
    with contextlib.closing(psycopg.connect(dsn, autocommit=autocommit)) as connection:
        yield Caller(
            connection,
            is_async=False,
            run=lambda result: result,
            execute=lambda statement: connection.execute(statement.encode()),
            commit=connection.commit,
            rollback=connection.rollback,
            close=connection.close,
            driver_error=psycopg.Error,
        )


@contextlib.contextmanager
def psycopg_async_connection(dsn: str, *, autocommit: bool) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        connection = runner.run(psycopg.AsyncConnection.connect(dsn, autocommit=autocommit))
        yield Caller(
            connection,
            is_async=True,
            run=runner.run,
            execute=lambda statement: runner.run(connection.execute(statement.encode())),
            commit=lambda: runner.run(connection.commit()),
            rollback=lambda: runner.run(connection.rollback()),
            close=lambda: runner.run(connection.close()),
            driver_error=psycopg.Error,
        )
        runner.run(connection.close())


@contextlib.contextmanager
def sqlalchemy_engine(dsn: str, *, autocommit: bool) -> Iterator[sqlalchemy.Engine]:
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    url = dsn.replace("postgresql:", "postgresql+psycopg:", 1)
    engine = sqlalchemy.create_engine(url, poolclass=NullPool, **options)
    yield engine
    engine.dispose()


@contextlib.contextmanager
def sqlalchemy_connection(dsn: str, *, autocommit: bool) -> Iterator[Caller]:
    with sqlalchemy_engine(dsn, autocommit=autocommit) as engine, engine.connect() as connection:
        yield Caller(
            connection,
            is_async=False,
            run=lambda result: result,
            execute=connection.exec_driver_sql,
            commit=connection.commit,
            rollback=connection.rollback,
            close=connection.close,
            driver_error=sqlalchemy.exc.DBAPIError,
        )


@contextlib.contextmanager
def sqlalchemy_session(dsn: str, *, autocommit: bool) -> Iterator[Caller]:
    with sqlalchemy_engine(dsn, autocommit=autocommit) as engine, orm.Session(engine) as session:
        yield Caller(
            session,
            is_async=False,
            run=lambda result: result,
            execute=lambda statement: session.execute(sqlalchemy.text(statement)),
            commit=session.commit,
            rollback=session.rollback,
            close=None,
            driver_error=sqlalchemy.exc.DBAPIError,
        )


@contextlib.contextmanager
def sqlalchemy_scoped_session(dsn: str, *, autocommit: bool) -> Iterator[Caller]:
    with sqlalchemy_session(dsn, autocommit=autocommit) as caller:
        registry = orm.scoped_session(cast("orm.sessionmaker[orm.Session]", lambda: caller.connection))
        yield Caller(**{**vars(caller), "connection": registry})


@contextlib.contextmanager
def sqlalchemy_async_engine(
    dsn: str, driver: str, runner: asyncio.Runner, *, autocommit: bool
) -> Iterator[AsyncEngine]:
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    url = dsn.replace("postgresql:", f"postgresql+{driver}:", 1)
    engine = create_async_engine(url, poolclass=NullPool, **options)
    yield engine
    runner.run(engine.dispose())


@contextlib.contextmanager
def sqlalchemy_async_connection(dsn: str, driver: str, *, autocommit: bool) -> Iterator[Caller]:
    with asyncio.Runner() as runner, sqlalchemy_async_engine(dsn, driver, runner, autocommit=autocommit) as engine:
        connection = engine.connect()
        runner.run(connection.start())
        yield Caller(
            connection,
            is_async=True,
            run=runner.run,
            execute=lambda statement: runner.run(connection.exec_driver_sql(statement)),
            commit=lambda: runner.run(connection.commit()),
            rollback=lambda: runner.run(connection.rollback()),
            close=lambda: runner.run(connection.close()),
            driver_error=sqlalchemy.exc.DBAPIError,
        )
        runner.run(connection.close())


@contextlib.contextmanager
def sqlalchemy_async_session(dsn: str, driver: str, *, autocommit: bool) -> Iterator[Caller]:
    with asyncio.Runner() as runner, sqlalchemy_async_engine(dsn, driver, runner, autocommit=autocommit) as engine:
        session = AsyncSession(engine)
        yield Caller(
            session,
            is_async=True,
            run=runner.run,
            execute=lambda statement: runner.run(session.execute(sqlalchemy.text(statement))),
            commit=lambda: runner.run(session.commit()),
            rollback=lambda: runner.run(session.rollback()),
            close=None,
            driver_error=sqlalchemy.exc.DBAPIError,
        )
        runner.run(session.close())


@contextlib.contextmanager
def sqlalchemy_async_scoped_session(dsn: str, *, autocommit: bool) -> Iterator[Caller]:
    with sqlalchemy_async_session(dsn, "asyncpg", autocommit=autocommit) as caller:
        factory = async_sessionmaker(caller.connection.bind)
        registry = async_scoped_session(factory, scopefunc=lambda: None)
        registry.registry.set(caller.connection)
        yield Caller(**{**vars(caller), "connection": registry})


def asyncpg_caller(connection: Any, runner: asyncio.Runner, close: Callable[[], object]) -> Caller:  # noqa: ANN401 - no types
    def end(command: str) -> None:
        runner.run(connection.execute(command))
        runner.run(connection.execute("BEGIN"))

    return Caller(
        connection,
        is_async=True,
        run=runner.run,
        execute=lambda statement: runner.run(connection.execute(statement)),
        commit=lambda: end("COMMIT"),
        rollback=lambda: end("ROLLBACK"),
        close=close,
        driver_error=asyncpg.PostgresError,
    )


@contextlib.contextmanager
def asyncpg_connection(dsn: str, *, autocommit: bool) -> Iterator[Caller]:
    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(dsn))
        if not autocommit:
            runner.run(connection.execute("BEGIN"))
        yield asyncpg_caller(connection, runner, lambda: runner.run(connection.close()))
        runner.run(connection.close())


@contextlib.contextmanager
def asyncpg_pooled_connection(dsn: str, *, autocommit: bool) -> Iterator[Caller]:
    """Return a pooled connection with the codec that many applications set."""

    async def decode_json(connection: Any) -> None:  # noqa: ANN401 - no types
        for name in ("json", "jsonb"):
            await connection.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")

    with asyncio.Runner() as runner:

        async def open_pool() -> Any:  # noqa: ANN401 - no types
            return await asyncpg.create_pool(dsn, min_size=1, max_size=1, init=decode_json)

        async def borrow(pool: Any) -> Any:  # noqa: ANN401 - no types
            return await pool.acquire()

        pool = runner.run(open_pool())
        connection = runner.run(borrow(pool))
        if not autocommit:
            runner.run(connection.execute("BEGIN"))
        yield asyncpg_caller(connection, runner, lambda: runner.run(pool.release(connection)))
        pool.terminate()


@contextlib.contextmanager
def django_connection(dsn: str, *, autocommit: bool) -> Iterator[Caller]:
    if not django.conf.settings.configured:
        django.conf.settings.configure(USE_TZ=True)
        django.setup()
    info = conninfo_to_dict(dsn)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": info["dbname"],
        "USER": info["user"],
        "PASSWORD": info.get("password", ""),
        "HOST": info["host"],
        "PORT": info.get("port", ""),
        "AUTOCOMMIT": autocommit,
    }
    wrapper = ConnectionHandler({"default": database})["default"]
    django.db.connections[DJANGO_ALIAS] = wrapper

    def execute(statement: str) -> None:
        with wrapper.cursor() as cursor:
            cursor.execute(statement)

    yield Caller(
        ConnectionProxy(django.db.connections, DJANGO_ALIAS),
        is_async=False,
        run=lambda result: result,
        execute=execute,
        commit=wrapper.commit,
        rollback=wrapper.rollback,
        close=None,
        driver_error=django.db.Error,
    )
    wrapper.close()
    del django.db.connections[DJANGO_ALIAS]


KINDS: dict[str, Callable[..., contextlib.AbstractContextManager[Caller]]] = {
    "psycopg": psycopg_connection,
    "psycopg async": psycopg_async_connection,
    "sqlalchemy connection": sqlalchemy_connection,
    "sqlalchemy session": sqlalchemy_session,
    "sqlalchemy scoped session": sqlalchemy_scoped_session,
    "sqlalchemy async connection, psycopg": lambda dsn, **o: sqlalchemy_async_connection(dsn, "psycopg_async", **o),
    "sqlalchemy async connection, asyncpg": lambda dsn, **o: sqlalchemy_async_connection(dsn, "asyncpg", **o),
    "sqlalchemy async session, psycopg": lambda dsn, **o: sqlalchemy_async_session(dsn, "psycopg_async", **o),
    "sqlalchemy async session, asyncpg": lambda dsn, **o: sqlalchemy_async_session(dsn, "asyncpg", **o),
    "sqlalchemy async scoped session": sqlalchemy_async_scoped_session,
    "asyncpg": asyncpg_connection,
    "asyncpg from a pool": asyncpg_pooled_connection,
    "django": django_connection,
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[..., contextlib.AbstractContextManager[Caller]]:
    return KINDS[request.param]


@pytest.fixture
def caller(kind: Callable[..., contextlib.AbstractContextManager[Caller]], dsn: str) -> Iterator[Caller]:
    with kind(dsn, autocommit=False) as opened:
        yield opened


@pytest.fixture
def observer(connect: Connect) -> psycopg.Connection:
    return connect(autocommit=True)


def payloads(observer: psycopg.Connection) -> list[object]:
    return [row[0] for row in observer.execute("SELECT payload FROM pgoutbox.message ORDER BY id").fetchall()]


# --- the contract -----------------------------------------------------------------------------------------------------


def test_enqueues_and_cancels_are_part_of_the_callers_transaction(caller: Caller, observer: psycopg.Connection) -> None:
    caller.execute("CREATE TABLE account (id bigint)")
    caller.enqueue("mail", 1)
    caller.enqueue_many([NewMessage("mail", 2), NewMessage("mail", 3, dedupe_key="k")])
    assert payloads(observer) == []
    caller.rollback()
    assert payloads(observer) == []

    first = caller.enqueue("mail", 4)
    (second,) = caller.enqueue_many([NewMessage("mail", 5, dedupe_key="k")])
    caller.execute("CREATE TABLE account (id bigint)")
    assert payloads(observer) == []
    caller.commit()
    assert payloads(observer) == [4, 5]
    assert observer.execute("SELECT * FROM account").fetchall() == []

    assert first is not None
    assert caller.cancel(first.id) is CancelResult.CANCELLED
    assert caller.cancel(topic="mail", dedupe_key="k") is CancelResult.CANCELLED
    caller.rollback()
    assert caller.cancel(topic="mail", dedupe_key="k") is CancelResult.CANCELLED
    assert caller.cancel(topic="mail", coalesce_key="k") is CancelResult.MISSING
    caller.commit()
    states = observer.execute("SELECT id, state FROM pgoutbox.message").fetchall()
    assert dict(states) == {first.id: "pending", second.id: "cancelled"}


def test_every_kind_of_connection_finds_and_edits(caller: Caller, observer: psycopg.Connection) -> None:
    message_id = cast("Enqueued", caller.enqueue("mail", 1, owner="ada")).id
    caller.commit()
    edit = caller.run(caller.producer.edit(message_id, owner="ada", payload={"n": 2}, destination="tel:1", delay=60))
    assert edit is EditResult.EDITED
    (found,) = caller.run(
        caller.producer.find(
            owner="ada", message_id=message_id, topics=["mail"], before_id=message_id + 1, limit=1, payloads=True
        )
    )
    assert (found.payload, found.destination, found.state) == ({"n": 2}, "tel:1", State.PENDING)
    assert payloads(observer) == [1]
    caller.rollback()
    assert [message.destination for message in caller.run(caller.producer.find(owner="ada"))] == [None]


def test_every_kind_of_connection_writes_the_same_row(caller: Caller, observer: psycopg.Connection) -> None:
    due = datetime.now(UTC).replace(microsecond=123_456) + timedelta(days=1)
    options: dict[str, Any] = {
        "queue": "bulk",
        "destination": "mailto:ä@example.org",
        "coalesce_key": "c{},\"'\\\n%s$1:x",
        "expires_at": due + timedelta(days=1),
        "headers": {"trace": "%s :x \"'\\"},
        "max_attempts": 3,
    }
    payload = {"text": "%s $1 :x \"'\\ \n ä \U0001f600", "list": [1, 2.5, None, True]}
    caller.enqueue("mail", payload, available_at=due, dedupe_key="1", **options)
    caller.enqueue_many(
        [NewMessage("mail", payload, available_at=due, dedupe_key="2", **options), NewMessage("mail", 1)]
    )
    caller.enqueue("mail", 2, delay=1.5)
    caller.enqueue_many([NewMessage("mail", 3, delay=timedelta(seconds=1.5))])
    caller.commit()
    columns = "payload, queue, destination, coalesce_key, available_at, expires_at, headers, max_attempts, dedupe_key"
    rows = observer.execute(f"SELECT {columns} FROM pgoutbox.message WHERE queue = 'bulk' ORDER BY id").fetchall()
    expected = (payload, "bulk", options["destination"], options["coalesce_key"], due, due + timedelta(days=1))
    assert rows == [(*expected, options["headers"], 3, key) for key in ("1", "2")]
    delays = observer.execute(
        "SELECT payload, available_at - created_at FROM pgoutbox.message WHERE queue = 'default' ORDER BY payload"
    ).fetchall()
    assert delays == [(1, timedelta(0)), (2, timedelta(seconds=1.5)), (3, timedelta(seconds=1.5))]


def test_no_savepoint_is_created_unless_requested(caller: Caller, observer: psycopg.Connection) -> None:
    caller.enqueue("mail", "plain")
    caller.enqueue_many([NewMessage("mail", "bulk")])
    caller.enqueue("mail", "best effort", best_effort=True)
    caller.commit()
    rows = observer.execute("SELECT payload, xmin::text FROM pgoutbox.message").fetchall()
    transactions: dict[str, str] = dict(rows)
    assert transactions["plain"] == transactions["bulk"] != transactions["best effort"]


@pytest.mark.slow
def test_many_repetitions_of_one_statement_succeed(caller: Caller, observer: psycopg.Connection) -> None:
    for number in range(12):
        caller.enqueue("mail", number)
        caller.enqueue_many([NewMessage("mail", number)])
        caller.commit()
    assert len(payloads(observer)) == 24


def test_a_call_outside_a_transaction_is_refused_unless_allowed(
    kind: Callable[..., contextlib.AbstractContextManager[Caller]], dsn: str, observer: psycopg.Connection
) -> None:
    with kind(dsn, autocommit=True) as caller:
        for call in (
            lambda: caller.enqueue("mail", 1),
            lambda: caller.enqueue_many([NewMessage("mail", 1)]),
            lambda: caller.cancel(1),
        ):
            with pytest.raises(TransactionError, match="begin a transaction, or pass require_transaction=False"):
                call()
        assert payloads(observer) == []
        enqueued = caller.enqueue("mail", 1, require_transaction=False)
        assert payloads(observer) == [1]
        caller.enqueue_many([NewMessage("mail", 2)], require_transaction=False)
        assert payloads(observer) == [1, 2]
        assert enqueued is not None
        assert caller.cancel(enqueued.id, require_transaction=False) is CancelResult.CANCELLED


def test_an_aborted_transaction_raises_its_own_error(caller: Caller) -> None:
    with pytest.raises(caller.driver_error):
        caller.execute("SELECT 1 / 0")
    for call in (lambda: caller.enqueue("mail", 1), lambda: caller.cancel(1)):
        with pytest.raises(TransactionError, match="the transaction is aborted; roll back first"):
            call()
    caller.rollback()
    assert caller.enqueue("mail", 1)


def test_the_refusal_of_a_later_schema_is_raised_in_its_words(caller: Caller, observer: psycopg.Connection) -> None:
    """A later schema may keep a function only to refuse the packages that call it."""
    observer.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'the schema pgoutbox needs version 99.1' USING ERRCODE = 'OB004'; END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON pgoutbox.message FOR EACH ROW EXECUTE FUNCTION public.refuse()"
    )
    with pytest.raises(SchemaError, match=r"the schema pgoutbox needs version 99\.1"):
        caller.enqueue("mail", 1)


def test_a_closed_connection_raises_its_own_error(caller: Caller) -> None:
    if caller.close is None:
        return  # A session or Django's connection reconnects by itself.
    caller.close()
    with pytest.raises(TransactionError, match="the connection is closed"):
        caller.enqueue("mail", 1)


def test_refusals_of_the_database_become_pgoutbox_errors(caller: Caller) -> None:
    past = datetime.now(UTC) - timedelta(hours=1)
    with pytest.raises(ArgumentError, match=r"^expires_at: must be later than now"):
        caller.enqueue("mail", 1, expires_at=past)
    caller.rollback()
    with pytest.raises(ArgumentError, match=r"^items\[1\]\.expires_at: must be later than now"):
        caller.enqueue_many([NewMessage("mail", 1), NewMessage("mail", 1, expires_at=past)])
    caller.rollback()
    caller.enqueue("mail", 1, dedupe_key="k")
    with pytest.raises(
        DedupeConflictError, match=r"^dedupe_key: message \d+ of topic mail has this key and another payload"
    ):
        caller.enqueue("mail", 2, dedupe_key="k")


def test_a_missing_schema_is_a_schema_error(
    kind: Callable[..., contextlib.AbstractContextManager[Caller]], empty_dsn: str
) -> None:
    with kind(empty_dsn, autocommit=False) as caller:
        with pytest.raises(SchemaError, match="run: pgoutbox migrate"):
            caller.enqueue("mail", 1)
        caller.rollback()
        with pytest.raises(SchemaError, match="run: pgoutbox migrate"):
            caller.cancel(topic="mail", coalesce_key="k")


def test_other_driver_errors_pass_through_unchanged(caller: Caller) -> None:
    caller.execute("SET TRANSACTION READ ONLY")
    with pytest.raises(caller.driver_error):
        caller.enqueue("mail", 1)


def test_best_effort_keeps_the_callers_transaction_usable(caller: Caller, observer: psycopg.Connection) -> None:
    caller.execute("CREATE TABLE account (id bigint)")
    assert caller.enqueue("mail", 1, dedupe_key="k", best_effort=True) is not None
    assert caller.enqueue("mail", 2, dedupe_key="k", best_effort=True) is None
    assert caller.enqueue("mail", "\0", best_effort=True) is None
    caller.execute("INSERT INTO account VALUES (7)")
    assert caller.enqueue("mail", 3, best_effort=True) is not None
    caller.commit()
    assert payloads(observer) == [1, 3]
    assert observer.execute("SELECT id FROM account").fetchall() == [(7,)]


def logged_failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["sqlstate"] for record in caplog.records if record.name == "pgoutbox.enqueue.producer"]


def lock_timeout_of(caller: Caller, observer: psycopg.Connection) -> str:
    """Return the setting in the caller's transaction, and commit."""
    observer.execute("CREATE TABLE IF NOT EXISTS seen (value text)")
    caller.execute("INSERT INTO seen SELECT current_setting('lock_timeout')")
    caller.commit()
    ((value,),) = observer.execute("DELETE FROM seen RETURNING value").fetchall()
    return str(value)


@pytest.mark.slow
def test_best_effort_waits_no_longer_than_a_second_for_a_locked_table(
    caller: Caller, connect: Connect, observer: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    locker = connect()
    locker.execute("LOCK TABLE pgoutbox.message")
    caller.execute("SET LOCAL lock_timeout = 0")
    caller.execute("SET LOCAL statement_timeout = '20s'")  # Ends the wait if there is no lock_timeout.
    caller.execute("CREATE TABLE account (id bigint)")
    assert caller.enqueue("mail", 1, best_effort=True) is None
    assert logged_failures(caplog) == ["55P03"]
    assert lock_timeout_of(caller, observer) == "0"
    locker.rollback()
    assert observer.execute("SELECT count(*) FROM account").fetchall() == [(0,)]
    assert caller.enqueue("mail", 2, best_effort=True) is not None
    caller.commit()
    assert payloads(observer) == [2]


def test_best_effort_leaves_the_callers_lock_timeout_alone(caller: Caller, observer: psycopg.Connection) -> None:
    before = lock_timeout_of(caller, observer)
    caller.execute("SET LOCAL lock_timeout = '7s'")
    assert caller.enqueue("mail", 1, dedupe_key="k", best_effort=True) is not None
    assert lock_timeout_of(caller, observer) == "7s"
    caller.execute("SET LOCAL lock_timeout = '7s'")
    assert caller.enqueue("mail", 2, dedupe_key="k", best_effort=True) is None
    assert lock_timeout_of(caller, observer) == "7s"
    assert lock_timeout_of(caller, observer) == before


@contextlib.contextmanager
def raises_what_tells_of_a_lost_connection(caller: Caller) -> Iterator[None]:
    with pytest.raises((TransactionError, caller.driver_error, asyncpg.InterfaceError)) as raised:
        yield
    assert str(raised.value) != "the transaction is aborted; roll back first"


def test_best_effort_reports_a_connection_that_was_already_lost(
    caller: Caller, observer: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caller.execute("CREATE TABLE account (id bigint)")
    observer.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with raises_what_tells_of_a_lost_connection(caller):
        caller.enqueue("mail", 1, best_effort=True)
    assert "enqueue_failed" not in [getattr(record, "event", None) for record in caplog.records]


def test_best_effort_reports_a_connection_that_is_lost_during_the_call(
    caller: Caller, observer: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    observer.execute(
        """
        CREATE FUNCTION end_session() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
        BEGIN
            PERFORM pg_terminate_backend(pg_backend_pid());
            RETURN NEW;
        END
        $$;
        CREATE TRIGGER end_session BEFORE INSERT ON pgoutbox.message FOR EACH ROW EXECUTE FUNCTION end_session()
        """
    )
    caller.execute("CREATE TABLE account (id bigint)")
    with raises_what_tells_of_a_lost_connection(caller):
        caller.enqueue("mail", 1, best_effort=True)
    assert "enqueue_failed" not in [getattr(record, "event", None) for record in caplog.records]


def test_best_effort_reports_a_closed_connection(caller: Caller) -> None:
    if caller.close is None:
        return  # A session or Django's connection reconnects by itself.
    caller.close()
    with pytest.raises(TransactionError, match="the connection is closed"):
        caller.enqueue("mail", 1, best_effort=True)


def test_the_kind_of_the_connection_decides_whether_calls_are_awaited(caller: Caller) -> None:
    assert type(caller.producer) is (AsyncProducer if caller.is_async else Producer)


# --- specific kinds ---------------------------------------------------------------------------------------------------


class TestPsycopg:
    @pytest.mark.parametrize(
        "options",
        [
            {"row_factory": dict_row},
            {"cursor_factory": psycopg.RawCursor},
            {"cursor_factory": psycopg.ClientCursor},
            {"prepare_threshold": 0},
            {"prepare_threshold": None},
        ],
    )
    def test_the_callers_connection_settings_do_no_harm(self, dsn: str, options: dict[str, Any]) -> None:
        with psycopg.connect(dsn, **options) as connection:
            for number in range(3):
                enqueued = Outbox().on(connection).enqueue("mail", number)
                assert Outbox().on(connection).enqueue_many([NewMessage("mail", number)])[0].id > enqueued.id

    @pytest.mark.parametrize("autocommit", [True, False])
    def test_an_enqueue_works_in_a_pipeline(
        self, connect: Connect, observer: psycopg.Connection, *, autocommit: bool
    ) -> None:
        connection = connect(autocommit=autocommit)
        outbox = Outbox()
        with connection.pipeline(), connection.transaction():
            connection.execute("CREATE TABLE account (id bigint)")
            outbox.on(connection).enqueue("mail", 1, dedupe_key="k")
            assert outbox.on(connection).enqueue("mail", 2, dedupe_key="k", best_effort=True) is None
            outbox.on(connection).enqueue_many([NewMessage("mail", 3)])
            connection.execute("INSERT INTO account VALUES (7)")
        connection.commit()
        assert payloads(observer) == [1, 3]
        assert observer.execute("SELECT id FROM account").fetchall() == [(7,)]

    def test_an_error_of_the_callers_statement_in_a_pipeline_is_not_an_enqueue_error(
        self, connection: psycopg.Connection
    ) -> None:
        with pytest.raises(errors.DivisionByZero), connection.pipeline():  # noqa: PT012 - met by the second statement
            connection.execute("SELECT 1 / 0")
            Outbox().on(connection).enqueue("mail", 1, best_effort=True)

    async def test_an_enqueue_works_in_an_async_pipeline(
        self, aconnect: AsyncConnect, observer: psycopg.Connection
    ) -> None:
        connection = await aconnect()
        outbox = Outbox()
        async with connection.pipeline():
            await outbox.on(connection).enqueue("mail", 1, dedupe_key="k")
            assert await outbox.on(connection).enqueue("mail", 2, dedupe_key="k", best_effort=True) is None
            await outbox.on(connection).enqueue_many([NewMessage("mail", 3)])
            with pytest.raises(errors.DivisionByZero):  # noqa: PT012 - met by the second statement
                await connection.execute("SELECT 1 / 0")
                await outbox.on(connection).enqueue("mail", 1, best_effort=True)
        await connection.rollback()
        assert payloads(observer) == []

    def test_a_transaction_block_on_an_autocommit_connection_is_a_transaction(
        self, connect: Connect, observer: psycopg.Connection
    ) -> None:
        connection = connect(autocommit=True)
        with connection.transaction():
            Outbox().on(connection).enqueue("mail", 1)
            assert payloads(observer) == []
        assert payloads(observer) == [1]

    async def test_an_async_transaction_block_on_an_autocommit_connection_is_a_transaction(
        self, aconnect: AsyncConnect, observer: psycopg.Connection
    ) -> None:
        connection = await aconnect(autocommit=True)
        async with connection.transaction():
            await Outbox().on(connection).enqueue("mail", 1)
            assert payloads(observer) == []
        assert payloads(observer) == [1]

    def test_a_subclass_of_the_connection_is_accepted(self, dsn: str) -> None:
        class Traced(psycopg.Connection[Any]):
            pass

        with Traced.connect(dsn) as connection:
            assert Outbox().on(connection).enqueue("mail", 1)

    def test_a_savepoint_of_the_caller_is_respected(self, connection: psycopg.Connection) -> None:
        with contextlib.suppress(LookupError), connection.transaction():
            connection.execute("SELECT")
            with connection.transaction():
                Outbox().on(connection).enqueue("mail", 1)
                Outbox().on(connection).enqueue("mail", 1, best_effort=True)
                raise LookupError
        connection.commit()
        assert payloads(connection) == []


class TestSQLAlchemy:
    def test_pending_objects_of_the_session_are_not_flushed(self, dsn: str, observer: psycopg.Connection) -> None:
        base: Any = orm.declarative_base()
        account = type(
            "Account",
            (base,),
            {"__tablename__": "account", "id": sqlalchemy.Column(sqlalchemy.BigInteger, primary_key=True)},
        )
        with sqlalchemy_engine(dsn, autocommit=False) as engine:
            base.metadata.create_all(engine)
            with orm.Session(engine) as session, session.begin():
                session.add(account(id=7))
                Outbox().on(session).enqueue("mail", 1)
                assert session.new
            assert payloads(observer) == [1]
            assert observer.execute("SELECT id FROM account").fetchall() == [(7,)]

    def test_a_session_whose_flush_failed_is_aborted(self, dsn: str) -> None:
        base: Any = orm.declarative_base()
        account = type(
            "Account",
            (base,),
            {"__tablename__": "missing", "id": sqlalchemy.Column(sqlalchemy.BigInteger, primary_key=True)},
        )
        with sqlalchemy_engine(dsn, autocommit=False) as engine, orm.Session(engine) as session:
            session.add(account(id=7))
            with pytest.raises(sqlalchemy.exc.ProgrammingError):
                session.flush()
            with pytest.raises(TransactionError, match="the transaction is aborted"):
                Outbox().on(session).enqueue("mail", 1)

    def test_a_rolled_back_nested_transaction_removes_its_message(self, dsn: str, observer: psycopg.Connection) -> None:
        with sqlalchemy_engine(dsn, autocommit=False) as engine, engine.begin() as connection:
            Outbox().on(connection).enqueue("mail", 1)
            nested = connection.begin_nested()
            Outbox().on(connection).enqueue("mail", 2)
            nested.rollback()
        assert payloads(observer) == [1]

    def test_another_database_is_a_type_error(self) -> None:
        engine = sqlalchemy.create_engine("sqlite://")
        with (
            engine.connect() as connection,
            pytest.raises(TypeError, match=r"the SQLAlchemy dialect is sqlite\+pysqlite"),
        ):
            Outbox().on(connection).enqueue("mail", 1)
        engine.dispose()

    def test_an_engine_is_not_a_connection(self, dsn: str) -> None:
        outbox: Any = Outbox()
        with (
            sqlalchemy_engine(dsn, autocommit=False) as engine,
            pytest.raises(TypeError, match=r"not sqlalchemy\..*Engine"),
        ):
            outbox.on(engine).enqueue("mail", 1)


class TestDjango:
    def test_an_atomic_block_is_a_transaction(self, dsn: str, observer: psycopg.Connection) -> None:
        with django_connection(dsn, autocommit=True) as caller:
            with django_transaction.atomic(using=DJANGO_ALIAS):
                for connection in (caller.connection, django.db.connections[DJANGO_ALIAS]):
                    caller.outbox.on(connection).enqueue("mail", 1)
                    assert caller.outbox.on(connection).enqueue("mail", "\0", best_effort=True) is None
                assert payloads(observer) == []
            assert payloads(observer) == [1, 1]

    def test_an_atomic_block_marked_for_rollback_is_aborted(self, dsn: str) -> None:
        with django_connection(dsn, autocommit=True) as caller, django_transaction.atomic(using=DJANGO_ALIAS):
            django_transaction.set_rollback(True, using=DJANGO_ALIAS)
            with pytest.raises(TransactionError, match="the transaction is aborted"):
                caller.enqueue("mail", 1)

    def test_another_database_is_a_type_error(self) -> None:
        handler = ConnectionHandler({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
        with pytest.raises(TypeError, match=r"Django's connection works on .*sqlite.*: pgoutbox takes PostgreSQL"):
            Outbox().on(handler["default"]).enqueue("mail", 1)


@pytest.mark.parametrize("thing", [None, "postgresql:///app", object(), Outbox()])
def test_any_other_object_is_a_type_error(thing: object) -> None:
    outbox: Any = Outbox()
    with pytest.raises(TypeError, match=r"^on takes psycopg\.Connection, .*, not "):
        outbox.on(thing).enqueue("mail", 1)


def test_the_refusal_of_another_driver_names_the_sql_function() -> None:
    outbox: Any = Outbox()
    with (
        contextlib.closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(TypeError, match=r"not sqlite3\.Connection; .* SELECT pgoutbox\.enqueue\(\.\.\.\)$"),
    ):
        outbox.on(connection).enqueue("mail", 1)
