"""Tests enqueue from Python on real connections: the rows, the refusals, and concurrent transactions."""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from pydantic import BaseModel

from pgoutbox import (
    ArgumentError,
    ConfigurationError,
    Context,
    DedupeConflictError,
    Enqueued,
    Message,
    NewMessage,
    Outbox,
    RetryPolicy,
    SchemaError,
    Topic,
    TransactionError,
    UnknownTopicError,
)
from pgoutbox.settings import Settings
from tests.support.held import delivered_once
from tests.support.races import until_blocked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Connect

CANARY = "canary-7f3a"


class Activation(BaseModel):
    user_id: int
    email: str


ACTIVATION = Topic(
    "mail.activation",
    payload=Activation,
    queue="critical",
    destination=lambda p: f"mailto:{p.email}",
    coalesce_key=lambda p: str(p.user_id),
    retry=RetryPolicy(max_attempts=4),
    delay=timedelta(minutes=1),
    expires_after=timedelta(hours=1),
)


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


def row(connection: psycopg.Connection, columns: str, message_id: int) -> tuple[Any, ...]:
    statement = f"SELECT {columns} FROM pgoutbox.message WHERE id = %s"
    found = connection.execute(statement.encode(), (message_id,)).fetchone()
    assert found is not None
    return found


def count(connection: psycopg.Connection) -> int:
    ((number,),) = connection.execute("SELECT count(*) FROM pgoutbox.message").fetchall()
    return int(number)


# --- one message ------------------------------------------------------------------------------------------------------


def test_the_message_exists_if_and_only_if_the_transaction_commits(outbox: Outbox, connect: Connect) -> None:
    producer, observer = connect(), connect(autocommit=True)
    outbox.on(producer).enqueue("mail", 1)
    assert count(observer) == 0
    producer.rollback()
    assert count(observer) == 0
    enqueued = outbox.on(producer).enqueue("mail", 2)
    producer.commit()
    assert row(observer, "payload, created_at = available_at", enqueued.id) == (2, True)
    assert not enqueued.duplicate


def test_a_defined_topic_sets_the_options_of_its_messages(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    outbox.define(ACTIVATION)
    payload = {"user_id": 7, "email": "a@example.org"}
    one = outbox.on(rolled_back).enqueue("mail.activation", payload)
    (many,) = outbox.on(rolled_back).enqueue_many(
        [NewMessage(ACTIVATION, Activation(user_id=7, email="a@example.org"))]
    )
    expected = (
        "critical", "mailto:a@example.org", "7", payload, 4, timedelta(minutes=1), timedelta(hours=1, minutes=1),
    )  # fmt: skip
    columns = (
        "queue, destination, coalesce_key, payload, max_attempts, available_at - created_at, expires_at - created_at"
    )
    for enqueued in (one, many):
        assert row(rolled_back, columns, enqueued.id) == expected


def test_expires_after_counts_from_the_due_time(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    topic = Topic("news", expires_after=60)
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    past = due - timedelta(days=30)
    messages = [NewMessage(topic, 1, available_at=due), NewMessage(topic, 2, available_at=past), NewMessage(topic, 3)]
    ids = [outbox.on(rolled_back).enqueue(m.topic, m.payload, **m.options).id for m in messages]
    ids += [enqueued.id for enqueued in outbox.on(rolled_back).enqueue_many([*messages, NewMessage("other", 4)])]
    lives = [row(rolled_back, "expires_at - available_at", message_id)[0] for message_id in ids]
    assert lives == [timedelta(seconds=60)] * 6 + [None]
    assert row(rolled_back, "available_at", ids[0]) == row(rolled_back, "available_at", ids[3]) == (due,)


def test_max_attempts_comes_from_the_call_the_topic_the_handler_or_the_default(
    outbox: Outbox, rolled_back: psycopg.Connection
) -> None:
    @outbox.handler("handled", retry=RetryPolicy(max_attempts=3))
    async def handle(message: Message, context: Context) -> None: ...

    topic = outbox.define(Topic("defined", retry=RetryPolicy(max_attempts=5)))
    messages: list[NewMessage[Any]] = [
        NewMessage("handled", 1), NewMessage(topic, 1), NewMessage("defined", 1), NewMessage("other", 1),
        NewMessage("handled", 1, max_attempts=9),
    ]  # fmt: skip
    many = outbox.on(rolled_back).enqueue_many(messages)
    one = [outbox.on(rolled_back).enqueue(m.topic, 1, **m.options) for m in messages]
    for enqueued in (many, one):
        assert [row(rolled_back, "max_attempts", e.id)[0] for e in enqueued] == [3, 5, 5, 11, 9]


def test_a_serializer_handles_values_that_are_not_json(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    one = outbox.on(rolled_back).enqueue("mail", {"at": moment}, serializer=str)
    (many,) = outbox.on(rolled_back).enqueue_many([NewMessage("mail", {"at": moment})], serializer=str)
    for enqueued in (one, many):
        assert row(rolled_back, "payload", enqueued.id) == ({"at": "2026-01-02 00:00:00+00:00"},)


def test_a_strict_outbox_refuses_unknown_topics(rolled_back: psycopg.Connection) -> None:
    strict = Outbox(strict=True)
    strict.define(Topic("defined"))

    @strict.handler("handled")
    def handle(message: Message, context: object) -> None: ...

    for topic in ("defined", "handled"):
        assert strict.on(rolled_back).enqueue(topic, 1).id
    for unknown in ("mistyped", Topic("mistyped")):
        with pytest.raises(UnknownTopicError, match="topic 'mistyped' is neither defined nor handled"):
            strict.on(rolled_back).enqueue(unknown, 1)


def test_a_call_with_another_definition_of_the_topic_is_refused(
    outbox: Outbox, rolled_back: psycopg.Connection
) -> None:
    outbox.define(Topic("mail", queue="bulk"))
    assert outbox.on(rolled_back).enqueue(Topic("mail", queue="bulk"), 1).id
    with pytest.raises(ConfigurationError, match="topic 'mail' has another definition"):
        outbox.on(rolled_back).enqueue(Topic("mail"), 1)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "options", "field"),
    [
        ({"a": {"b": "x\0"}}, {}, "payload.a.b"),
        ("x" * 1001, {}, "payload"),
        (1, {"queue": "Bulk"}, "queue"),
        (1, {"available_at": datetime.max.replace(tzinfo=UTC)}, "available_at"),
        (1, {"headers": {"a": "\r\n"}}, "headers.a"),
        (1, {"max_attempts": 0}, "max_attempts"),
    ],
)
def test_an_invalid_argument_is_refused_before_any_sql(
    rolled_back: psycopg.Connection, payload: object, options: dict[str, Any], field: str
) -> None:
    outbox = Outbox(Settings(max_payload_bytes=1000))
    with pytest.raises(ArgumentError) as caught:
        outbox.on(rolled_back).enqueue("mail", payload, **options)
    assert caught.value.field == field
    with pytest.raises(ArgumentError) as caught:
        outbox.on(rolled_back).enqueue_many([NewMessage("mail", 1), NewMessage("mail", payload, **options)])
    assert caught.value.field == f"items[1].{field}"
    assert rolled_back.info.transaction_status is TransactionStatus.IDLE


def test_a_refusal_by_the_database_raises_the_same_error(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    past = datetime.now(UTC) - timedelta(hours=1)
    with pytest.raises(ArgumentError) as caught, rolled_back.transaction():
        outbox.on(rolled_back).enqueue("mail", 1, expires_at=past)
    assert str(caught.value) == "expires_at: must be later than now and than the due time"
    assert type(caught.value) is ArgumentError
    assert isinstance(caught.value.__cause__, errors.InvalidParameterValue)
    items = [NewMessage("mail", 1, coalesce_key="k", expires_at=past), *([NewMessage("mail", 1)] * 6000)]
    with pytest.raises(ArgumentError) as caught, rolled_back.transaction():
        outbox.on(rolled_back).enqueue_many(items)
    assert caught.value.field == "items[0].expires_at"


def test_a_dedupe_key_with_another_payload_is_a_duplicate_error(
    outbox: Outbox, rolled_back: psycopg.Connection
) -> None:
    first = outbox.on(rolled_back).enqueue("mail", {"a": 1}, dedupe_key="k")
    assert outbox.on(rolled_back).enqueue("mail", {"a": 1}, dedupe_key="k") == Enqueued(first.id, True)
    for enqueue in (
        lambda: outbox.on(rolled_back).enqueue("mail", {"a": CANARY}, dedupe_key="k"),
        lambda: outbox.on(rolled_back).enqueue_many([NewMessage("mail", {"a": CANARY}, dedupe_key="k")]),
    ):
        with pytest.raises(DedupeConflictError) as caught, rolled_back.transaction():
            enqueue()
        assert str(caught.value) == f"dedupe_key: message {first.id} of topic mail has this key and another payload"


def test_a_missing_schema_is_a_schema_error_that_names_the_command(outbox: Outbox, empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as connection:
        for call in (
            lambda: outbox.on(connection).enqueue("mail", 1),
            lambda: outbox.on(connection).enqueue_many([NewMessage("mail", 1)]),
            lambda: outbox.on(connection).cancel(1),
            lambda: outbox.on(connection).cancel(topic="mail", dedupe_key="k"),
        ):
            with pytest.raises(SchemaError, match="run: pgoutbox migrate"):
                call()
            connection.rollback()


def test_a_missing_table_of_the_schema_is_named(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    rolled_back.execute("ALTER TABLE pgoutbox.dedupe RENAME TO elsewhere")
    with pytest.raises(SchemaError, match=r"^pgoutbox\.dedupe does not exist: .* restore that part from a backup"):
        outbox.on(rolled_back).enqueue("mail", 1, dedupe_key="k")


def test_a_missing_function_of_a_foreign_trigger_is_not_a_schema_error(
    outbox: Outbox, rolled_back: psycopg.Connection
) -> None:
    rolled_back.execute(
        """
        CREATE FUNCTION pg_temp.broken() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM no_such_function(); RETURN NEW; END';
        CREATE TRIGGER broken BEFORE INSERT ON pgoutbox.message_live FOR EACH ROW EXECUTE FUNCTION pg_temp.broken();
        """
    )
    with pytest.raises(errors.UndefinedFunction):
        outbox.on(rolled_back).enqueue("mail", 1)


def test_other_server_errors_pass_through_unchanged(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    rolled_back.execute("SET TRANSACTION READ ONLY")
    with pytest.raises(errors.ReadOnlySqlTransaction):
        outbox.on(rolled_back).enqueue("mail", 1)


# --- many messages ----------------------------------------------------------------------------------------------------


def test_an_empty_bulk_runs_no_statement(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    assert outbox.on(rolled_back).enqueue_many([]) == []
    assert rolled_back.info.transaction_status is TransactionStatus.IDLE


def test_an_iterator_that_raises_midway_leaves_nothing_behind(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    def items() -> Iterator[NewMessage[int]]:
        yield from (NewMessage("mail", n) for n in range(6000))
        raise LookupError

    with pytest.raises(LookupError):
        outbox.on(rolled_back).enqueue_many(items())
    assert rolled_back.info.transaction_status is TransactionStatus.IDLE


def test_the_invalid_item_of_ten_thousand_is_named(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    items = [NewMessage("mail", {"x": float("nan") if n == 4711 else n}) for n in range(10_000)]
    with pytest.raises(ArgumentError, match=r"^items\[4711\]\.payload\.x: not JSON: nan$"):
        outbox.on(rolled_back).enqueue_many(items)
    with pytest.raises(TypeError, match=r"items\[1\] must be a NewMessage, not tuple"):
        outbox.on(rolled_back).enqueue_many([NewMessage("mail", 1), ("mail", 2)])  # type: ignore[list-item]
    assert rolled_back.info.transaction_status is TransactionStatus.IDLE


@pytest.mark.slow
def test_the_answers_are_in_the_order_of_the_items_across_chunks(
    outbox: Outbox, rolled_back: psycopg.Connection
) -> None:
    items = [NewMessage("mail", n, coalesce_key=str(n % 7) if n % 3 == 0 else None) for n in range(12_345)]
    enqueued = outbox.on(rolled_back).enqueue_many(items)
    rows = rolled_back.execute("SELECT id, payload FROM pgoutbox.message").fetchall()
    assert {e.id: n for n, e in enumerate(enqueued)} == dict(rows)
    for keys in ({None}, {"0"}, {"3"}):
        ids = [e.id for item, e in zip(items, enqueued, strict=True) if item.options.get("coalesce_key") in keys]
        assert ids == sorted(ids)


# --- two transactions -------------------------------------------------------------------------------------------------


def test_an_enqueue_waiting_for_a_dedupe_key_returns_the_committed_message(outbox: Outbox, connect: Connect) -> None:
    winner, waiting, observer = connect(), connect(), connect(autocommit=True)
    first = outbox.on(winner).enqueue("mail", 1, dedupe_key="k")
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(outbox.on(waiting).enqueue, "mail", 1, dedupe_key="k")
        until_blocked(observer, waiting, second)
        winner.commit()
    assert second.result() == Enqueued(first.id, True)
    waiting.commit()
    assert count(observer) == 1


def test_an_enqueue_waiting_for_a_dedupe_key_inserts_after_a_rollback(outbox: Outbox, connect: Connect) -> None:
    winner, waiting, observer = connect(), connect(), connect(autocommit=True)
    outbox.on(winner).enqueue("mail", 1, dedupe_key="k")
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(outbox.on(waiting).enqueue, "mail", 2, dedupe_key="k")
        until_blocked(observer, waiting, second)
        winner.rollback()
    enqueued = second.result()
    assert enqueued is not None
    assert not enqueued.duplicate
    waiting.commit()
    assert row(observer, "payload", enqueued.id) == (2,)
    assert count(observer) == 1


async def test_within_one_coalesce_key_the_order_of_ids_is_the_order_of_commits(
    outbox: Outbox, dsn: str, connect: Connect
) -> None:
    first, waiting, observer = connect(), connect(), connect(autocommit=True)
    outbox.on(first).enqueue("mail", 1, coalesce_key="k")
    with ThreadPoolExecutor(1) as threads:
        last = threads.submit(outbox.on(waiting).enqueue, "mail", 3, coalesce_key="k")
        until_blocked(observer, waiting, last)
        # Drawn while the other one waits: an id that the waiting one had drawn before its lock would be smaller.
        second = outbox.on(first).enqueue("mail", 2, coalesce_key="k")
        first.commit()
    enqueued = last.result()
    assert enqueued is not None
    assert enqueued.id > second.id
    waiting.commit()
    assert await delivered_once(dsn, "mail") == [enqueued.id]


# --- isolation levels -------------------------------------------------------------------------------------------------

STRICT_LEVELS = [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE]


@pytest.fixture(params=STRICT_LEVELS, ids=lambda level: level.name)
def strict(request: pytest.FixtureRequest, connect: Connect) -> psycopg.Connection:
    connection = connect()
    connection.isolation_level = request.param
    return connection


@pytest.mark.parametrize("key", ["coalesce_key", "dedupe_key", "ordering_key"])
def test_a_strict_transaction_cannot_use_a_key_that_was_used_since_its_snapshot(
    outbox: Outbox, strict: psycopg.Connection, connect: Connect, key: str
) -> None:
    options: dict[str, Any] = {key: "k"}
    strict.execute("SELECT FROM pgoutbox.message")
    outbox.on(connect(autocommit=True)).enqueue("mail", 1, require_transaction=False, **options)
    with pytest.raises(errors.SerializationFailure):
        outbox.on(strict).enqueue("mail", 1, **options)
    strict.rollback()
    assert outbox.on(strict).enqueue("mail", 1, **options)


def test_a_strict_transaction_enqueues_what_takes_no_lock(
    outbox: Outbox, strict: psycopg.Connection, connect: Connect
) -> None:
    strict.execute("SELECT FROM pgoutbox.message")
    outbox.on(connect(autocommit=True)).enqueue("mail", 1, require_transaction=False)
    outbox.on(strict).enqueue("mail", 2)
    strict.commit()
    assert count(strict) == 2


def test_a_strict_transaction_cannot_cancel_what_changed_since_its_snapshot(
    outbox: Outbox, strict: psycopg.Connection, connect: Connect
) -> None:
    other = connect(autocommit=True)
    enqueued = outbox.on(other).enqueue("mail", 1, owner="7", require_transaction=False)
    strict.execute("SELECT FROM pgoutbox.message")
    outbox.on(other).reschedule(enqueued.id, delay=60, require_transaction=False)
    with pytest.raises(errors.SerializationFailure):
        outbox.on(strict).cancel_all(owner="7")


# --- best effort ------------------------------------------------------------------------------------------------------


@pytest.fixture
def business(connection: psycopg.Connection) -> psycopg.Connection:
    """Return a connection with an uncommitted write of its own."""
    connection.execute("CREATE TABLE account (id bigint)")
    connection.commit()
    connection.execute("INSERT INTO account VALUES (7)")
    return connection


def accounts(connection: psycopg.Connection) -> list[tuple[int]]:
    return connection.execute("SELECT id FROM account").fetchall()


def failure(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """Return the fields of the only log record, after checking that its text names them and shows no secret."""
    (record,) = caplog.records
    assert record.name == "pgoutbox.enqueue.producer"
    assert record.levelno == logging.ERROR
    assert record.exc_info is None
    assert CANARY not in str(vars(record))
    names = ("topic", "coalesce_key", "dedupe_key", "ordering_key", "owner", "error_type", "sqlstate", "field", "error")
    fields = {name: vars(record)[name] for name in names}
    known = {name: value for name, value in fields.items() if value is not None}
    keys = ", ".join(f"{name} {known[name]}" for name in names[:5] if name in known)
    reason = ": ".join(str(known[name]) for name in names[5:] if name in known)
    assert record.getMessage() == f"a message could not be enqueued; the caller continues without it: {keys}: {reason}"
    assert vars(record)["event"] == "enqueue_failed"
    return known


def test_best_effort_returns_the_receipt_without_an_error(outbox: Outbox, business: psycopg.Connection) -> None:
    enqueued = outbox.on(business).enqueue("mail", 1, best_effort=True)
    business.commit()
    assert enqueued is not None
    assert row(business, "payload", enqueued.id) == (1,)
    assert accounts(business) == [(7,)]


def test_best_effort_logs_an_error_and_the_caller_continues(
    outbox: Outbox, business: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    payload = {CANARY: [CANARY, "\0"]}
    assert outbox.on(business).enqueue("mail", payload, dedupe_key="welcome-7", owner="7", best_effort=True) is None
    business.commit()
    assert accounts(business) == [(7,)]
    assert failure(caplog) == {
        "topic": "mail",
        "dedupe_key": "welcome-7",
        "owner": "7",
        "error_type": "ArgumentError",
        "field": "payload",
        "error": "NUL at character 0 is not storable",
    }


def test_best_effort_rolls_back_only_the_enqueue(
    outbox: Outbox, business: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.on(business).enqueue("mail", 1, dedupe_key="k")
    assert outbox.on(business).enqueue("mail", {"a": CANARY}, dedupe_key="k", best_effort=True) is None
    business.commit()
    assert accounts(business) == [(7,)]
    assert count(business) == 1
    assert failure(caplog) == {
        "topic": "mail",
        "dedupe_key": "k",
        "error_type": "DedupeConflictError",
        "sqlstate": "23505",
        "error": "dedupe_key: message 1 of topic mail has this key and another payload",
    }


def test_best_effort_names_the_keys_that_the_topic_computes(
    outbox: Outbox, business: psycopg.Connection, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    topic: Topic[Any] = Topic(
        "mail", coalesce_key=lambda p: p["key"], dedupe_key=lambda p: p["key"] * 2, owner=lambda p: p["owner"]
    )
    connect().execute("LOCK TABLE pgoutbox.message")
    payload = {"key": "a\nERROR forged", "owner": "7", "secret": CANARY}
    business.execute("SET LOCAL lock_timeout = '10ms'")
    assert outbox.on(business).enqueue(topic, payload, best_effort=True) is None
    assert failure(caplog) == {
        "topic": "mail",
        "coalesce_key": "a ERROR forged",
        "dedupe_key": "a ERROR forgeda ERROR forged",
        "owner": "7",
        "error_type": "LockNotAvailable",
        "sqlstate": "55P03",
        "error": "canceling statement due to lock timeout; another session held a table of the outbox for a second, or "
        "a lock for the caller's lock_timeout",
    }


def test_best_effort_names_the_fix_for_a_key_that_was_used_since_the_snapshot(
    outbox: Outbox, strict: psycopg.Connection, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    strict.execute("CREATE TABLE account (id bigint)")
    strict.commit()
    strict.execute("INSERT INTO account VALUES (7)")
    outbox.on(connect(autocommit=True)).enqueue("mail", 2, coalesce_key="k", require_transaction=False)
    assert outbox.on(strict).enqueue("mail", 3, coalesce_key="k", best_effort=True) is None
    strict.commit()
    assert accounts(strict) == [(7,)]
    logged = failure(caplog)
    assert logged["sqlstate"] == "40001"
    assert str(logged["error"]).endswith(
        "; its key was used after this transaction's snapshot: repeat the whole transaction"
    )


def test_best_effort_logs_no_row_and_no_secret_of_an_error(
    outbox: Outbox, business: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    business.execute(
        """
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION 'capped, token=%', NEW.payload->>'a' USING DETAIL = NEW.payload::text;
        END
        $$;
        CREATE TRIGGER refuse BEFORE INSERT ON pgoutbox.message FOR EACH ROW EXECUTE FUNCTION refuse()
        """
    )
    assert outbox.on(business).enqueue("mail", {"a": CANARY}, best_effort=True) is None
    assert failure(caplog)["error"] == "capped, token=(redacted)"


def test_best_effort_logs_no_text_of_an_error_without_error_texts(
    business: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(Settings(error_texts=False))
    topic: Topic[Any] = Topic("mail", owner=lambda p: p["owner"][CANARY])
    assert outbox.on(business).enqueue(topic, {"owner": {}}, best_effort=True) is None
    assert failure(caplog) == {"topic": "mail", "error_type": "KeyError"}


@pytest.mark.parametrize("callers", ["0", "250ms", "1s", "7s", "2min"])
@pytest.mark.parametrize(("scope", "autocommit"), [("SET", True), ("SET", False), ("SET LOCAL", False)])
def test_best_effort_enqueues_with_the_callers_lock_timeout_and_leaves_it_alone(
    outbox: Outbox, connect: Connect, callers: str, scope: str, *, autocommit: bool
) -> None:
    connection = connect(autocommit=autocommit)
    connection.execute(
        """
        CREATE TABLE seen (value text);
        CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
        BEGIN
            INSERT INTO public.seen VALUES (current_setting('lock_timeout'));
            RETURN NEW;
        END
        $$;
        CREATE TRIGGER see BEFORE INSERT ON pgoutbox.message FOR EACH ROW EXECUTE FUNCTION see()
        """
    )
    connection.commit()
    before = connection.execute("SHOW lock_timeout").fetchall()
    connection.execute(f"{scope} lock_timeout = '{callers}'".encode())
    in_force = connection.execute("SHOW lock_timeout").fetchall()
    for payload in (1, 2):  # The second one is refused.
        outbox.on(connection).enqueue("mail", payload, dedupe_key="k", best_effort=True, require_transaction=False)
        assert connection.execute("SHOW lock_timeout").fetchall() == in_force
    assert connection.execute("SELECT value FROM seen").fetchall() == [(callers,)]
    connection.commit()
    assert connection.execute("SHOW lock_timeout").fetchall() == (in_force if scope == "SET" else before)


def test_best_effort_leaves_no_savepoint_behind(outbox: Outbox, business: psycopg.Connection) -> None:
    outbox.on(business).enqueue("mail", 1, best_effort=True)
    outbox.on(business).enqueue("mail", 1, expires_at=datetime.now(UTC) - timedelta(hours=1), best_effort=True)
    with pytest.raises(errors.InvalidSavepointSpecification):
        business.execute("ROLLBACK TO SAVEPOINT pgoutbox_best_effort")


def test_best_effort_survives_a_missing_schema(
    outbox: Outbox, empty_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(empty_dsn) as connection:
        connection.execute("CREATE TABLE account (id bigint)")
        assert outbox.on(connection).enqueue("mail", 1, best_effort=True) is None
        connection.commit()
        assert accounts(connection) == []
    logged = failure(caplog)
    assert logged["error_type"] == "SchemaError"
    assert "pgoutbox migrate" in str(logged["error"])


def test_best_effort_does_not_let_a_transaction_block_end_as_committed(
    outbox: Outbox, dsn: str, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with (  # noqa: PT012 - raised by the last statement
        pytest.raises(errors.AdminShutdown),
        psycopg.connect(dsn) as connection,  # The block does not commit on a lost connection, and raises no error.
    ):
        connection.execute("CREATE TABLE account (id bigint)")
        connect(autocommit=True).execute("SELECT pg_terminate_backend(%s, 10000)", (connection.info.backend_pid,))
        outbox.on(connection).enqueue("mail", 1, best_effort=True)
    assert caplog.records == []


def test_best_effort_in_an_aborted_transaction_is_logged(
    outbox: Outbox, business: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(errors.DivisionByZero):
        business.execute("SELECT 1 / 0")
    assert outbox.on(business).enqueue("mail", 1, best_effort=True) is None
    assert failure(caplog)["error_type"] == "TransactionError"


def test_best_effort_outside_a_transaction_makes_no_savepoint(
    outbox: Outbox, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect(autocommit=True)
    assert outbox.on(connection).enqueue("mail", 1, best_effort=True) is None
    assert failure(caplog)["error_type"] == "TransactionError"
    assert outbox.on(connection).enqueue("mail", 1, best_effort=True, require_transaction=False) is not None
    assert count(connection) == 1


def test_best_effort_does_not_hide_programming_errors(outbox: Outbox, connection: psycopg.Connection) -> None:
    with pytest.raises(TypeError, match=r"^on takes psycopg\.Connection, .*, not builtins\.str$"):
        outbox.on("postgresql:///app").enqueue("mail", 1, best_effort=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'qeue'"):
        outbox.on(connection).enqueue("mail", 1, best_effort=True, qeue="bulk")  # type: ignore[call-overload]


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_terminated_backend_commits_nothing_and_raises_an_error(outbox: Outbox, connect: Connect) -> None:
    enqueuing, committing, observer = connect(), connect(), connect(autocommit=True)
    for producer in (enqueuing, committing):
        outbox.on(producer).enqueue("mail", 1)
        observer.execute("SELECT pg_terminate_backend(%s, 2000)", (producer.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        outbox.on(enqueuing).enqueue("mail", 2)
    with pytest.raises(psycopg.OperationalError):
        committing.commit()
    assert count(observer) == 0
    with pytest.raises(TransactionError, match="the connection is closed"):
        outbox.on(enqueuing).enqueue("mail", 3)


@contextmanager
def losing_the_reply_to_commit(dsn: str) -> Iterator[str]:
    """Run a proxy that forwards a COMMIT, waits for the server's reply to it, and disconnects instead of forwarding
    it."""
    info = conninfo_to_dict(dsn)
    host, port = str(info["host"]), int(info.get("port") or 5432)
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/.s.PGSQL.5432")
        listener.listen()

        def relay() -> None:
            client = listener.accept()[0]
            server = socket.socket(socket.AF_UNIX) if host.startswith("/") else socket.socket()
            with client, server:
                server.connect(f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port))
                committing = threading.Event()
                replies = threading.Thread(target=forward_replies, args=(server, client, committing))
                replies.start()
                while not committing.is_set() and (data := client.recv(65536)):
                    if b"COMMIT" in data:
                        committing.set()
                    server.sendall(data)
                replies.join()

        def forward_replies(server: socket.socket, client: socket.socket, committing: threading.Event) -> None:
            while (data := server.recv(65536)) and not committing.is_set():
                client.sendall(data)

        thread = threading.Thread(target=relay)
        thread.start()
        yield make_conninfo(dsn, host=directory, port=5432)
        thread.join()


def test_an_enqueue_repeated_after_a_lost_reply_to_commit_is_one_message(
    outbox: Outbox, dsn: str, connection: psycopg.Connection
) -> None:
    with losing_the_reply_to_commit(dsn) as lossy_dsn, psycopg.connect(lossy_dsn) as producer:
        outbox.on(producer).enqueue("mail", {"order": 1}, dedupe_key="order-1")
        with pytest.raises(psycopg.OperationalError):
            producer.commit()
    again = outbox.on(connection).enqueue("mail", {"order": 1}, dedupe_key="order-1")
    connection.commit()
    assert again.duplicate
    assert count(connection) == 1


# --- any payload ------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(), max_size=20) | st.sampled_from(["\0", "\ud800", "\\u0000", "é", "\u2028", "NaN"])
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**4299)
    | st.floats()
    | TEXT
    | st.binary(max_size=3)
    | st.datetimes(),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(TEXT | st.integers(), inner, max_size=5) | st.tuples(inner)
    ),
    max_leaves=15,
)


def same(stored: object, given_value: object) -> bool:
    """Return whether the row holds the value: jsonb stores numbers as decimals, and has no tuples."""
    if isinstance(given_value, dict):
        return (
            isinstance(stored, dict)
            and stored.keys() == given_value.keys()
            and all(same(stored[key], item) for key, item in given_value.items())
        )
    if isinstance(given_value, (list, tuple)):
        return isinstance(stored, list) and len(stored) == len(given_value) and all(map(same, stored, given_value))
    if isinstance(given_value, float) and isinstance(stored, (int, float)):
        return float(stored) == given_value
    return type(stored) is type(given_value) and stored == given_value


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=ANYTHING, key=TEXT)
def test_any_value_is_stored_unchanged_or_refused_with_its_path(
    rolled_back: psycopg.Connection, payload: object, key: str
) -> None:
    outbox = Outbox()
    with rolled_back.transaction(force_rollback=True):
        try:
            one = outbox.on(rolled_back).enqueue("mail", payload, coalesce_key=key)
        except ArgumentError:
            with pytest.raises(ArgumentError, match=r"^items\[0\]\.(payload|coalesce_key)"):
                outbox.on(rolled_back).enqueue_many([NewMessage("mail", payload, coalesce_key=key)])
            assert count(rolled_back) == 0
        else:
            (many,) = outbox.on(rolled_back).enqueue_many([NewMessage("mail", payload, coalesce_key=key)])
            for enqueued in (one, many):
                stored, stored_key = row(rolled_back, "payload, coalesce_key", enqueued.id)
                assert same(stored, payload)
                assert stored_key == key
