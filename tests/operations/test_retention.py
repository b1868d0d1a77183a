"""Tests workers under a rule that keeps no sent messages, and the commands by which an operator sets rules."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgoutbox import Outbox
from pgoutbox.cli.main import main
from pgoutbox.database import sql
from pgoutbox.database.store import Store
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.kernel import statements
from pgoutbox.message import Message, Outcome, Permanent, Skip, State, Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.operations import Operator
from pgoutbox.retry import RetryPolicy
from pgoutbox.settings import ENVIRONMENT_PREFIX
from pgoutbox.worker import Worker
from pgoutbox.worker.kernel_run import Link
from tests.support.messages import put
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    enqueue,
    lapse,
    make_due,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until
from tests.support.worker_process import connection_count
from tests.support.worker_sql import WatchedWorker, claim, forget_sent, run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgoutbox.kernel.seams import Row, Step
    from tests.conftest import Connect

SPAWN = multiprocessing.get_context("spawn")
ZERO = timedelta()
DAY = timedelta(days=1)
AT_ONCE = RetryPolicy.steps(0, jitter=0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often a worker has run each statement."""
    statements: Counter[str] = Counter()
    fetch = WorkerConnection.fetch

    async def counted(self: WorkerConnection, statement: Any, parameters: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
        statements[statement] += 1
        return await fetch(self, statement, parameters, **options)

    monkeypatch.setattr(WorkerConnection, "fetch", counted)
    return statements


def register(outbox: Outbox, kind: str) -> list[int]:
    """Register a handler of this kind, and return the ids of its messages."""
    got: list[int] = []
    if kind in ("async", "transactional"):

        @outbox.handler("greet", transactional=kind != "async")
        async def handle(message: Message, ctx: Context) -> None:
            got.append(message.id)

    elif kind == "batch":

        @outbox.batch_handler("greet")
        async def handle_all(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
            got.extend(message.id for message in messages)

    else:

        @outbox.handler("greet", transactional=kind != "sync")
        def handle_in_thread(message: Message, ctx: SyncContext) -> None:
            got.append(message.id)

    return got


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "sync", "batch", "transactional", "transactional sync"])
async def test_a_message_is_deleted_as_it_is_sent(outbox: Outbox, db: psycopg.Connection, kind: str) -> None:
    Operator(db).set_retention("greet", "sent", ZERO)
    got = register(outbox, kind)
    ids = [enqueue(db) for _ in range(6)]
    worker = Worker(outbox)
    await worker.run_once()
    assert sorted(got) == ids
    assert rows_of(db) == []
    assert (worker.telemetry.counts[LogEvent.SENT], worker.telemetry.counts[LogEvent.LEASE_LOST]) == (6, 0)


async def test_only_sent_messages_are_deleted(outbox: Outbox, db: psycopg.Connection) -> None:
    Operator(db).set_retention("*", "sent", ZERO)
    outcomes: dict[object, Outcome | None] = {
        "sent": None, "failed": Permanent("no"), "skipped": Skip("no"), "retried": Transient("no", retry_after=60),
    }  # fmt: skip

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Outcome | None:
        return outcomes[message.payload]

    ids = {payload: enqueue(db, payload=payload) for payload in outcomes}
    await Worker(outbox).run_once()
    del ids["sent"]
    assert [(row.id, row.state) for row in rows_of(db)] == [
        (ids["failed"], "failed"), (ids["skipped"], "skipped"), (ids["retried"], "pending"),
    ]  # fmt: skip


WAIT_AT_DELETIONS = """
CREATE FUNCTION wait_at_deletion() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN PERFORM pg_advisory_xact_lock(7); RETURN OLD; END$$;
CREATE TRIGGER wait_at_deletion BEFORE DELETE ON pgoutbox.message_live
    FOR EACH ROW EXECUTE FUNCTION wait_at_deletion();
"""
IS_WAITING = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted"


async def test_a_message_that_is_locked_until_the_midst_of_its_finish_is_deleted_too(
    outbox: Outbox, db: psycopg.Connection, connect: Connect
) -> None:
    Operator(db).set_retention("*", "sent", ZERO)
    locker, gate = connect(), connect()
    db.execute(WAIT_AT_DELETIONS)
    gate.execute("SELECT pg_advisory_xact_lock(7)")

    @outbox.batch_handler("greet")
    async def greet(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        last = max(message.id for message in messages)
        await asyncio.to_thread(locker.execute, "SELECT FROM pgoutbox.message WHERE id = %s FOR UPDATE", [last])

    enqueue(db)
    enqueue(db)
    async with running(Worker(outbox)):
        await until(lambda: db.execute(IS_WAITING).fetchall())
        locker.rollback()
        gate.rollback()
        await until(lambda: all(row.state == "sent" for row in rows_of(db)))
    assert rows_of(db) == []


async def test_the_history_of_failed_attempts_is_deleted_too(outbox: Outbox, db: psycopg.Connection) -> None:
    Operator(db).set_retention("*", "sent", ZERO)

    @outbox.handler("greet", retry=AT_ONCE)
    async def greet(message: Message, ctx: Context) -> None:
        if message.attempt_count == 1:
            raise ValueError("busy")

    message_id = enqueue(db)
    await Worker(outbox).run_once()
    assert len(attempts_of(db, message_id)) in (0, 1)
    if rows_of(db):
        make_due(db, message_id)
        await Worker(outbox).run_once()
    assert (rows_of(db), attempts_of(db, message_id)) == ([], [])


async def test_a_successor_of_a_deleted_message_is_delivered(outbox: Outbox, db: psycopg.Connection) -> None:
    Operator(db).set_retention("*", "sent", ZERO)
    got: list[object] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        got.append(message.payload)
        if message.payload == "first":
            enqueue(db, payload="second", coalesce_key="k")

    enqueue(db, payload="first", coalesce_key="k")
    await Worker(outbox).run_once()
    assert (got, rows_of(db)) == (["first", "second"], [])


async def test_a_running_worker_learns_of_a_rule_with_few_queries(
    outbox: Outbox, dsn: str, db: psycopg.Connection, asked: Counter[str]
) -> None:
    got = register(outbox, "async")
    worker = WatchedWorker(outbox, settings=settings_for(dsn, batch_size=1))
    async with running(worker):
        await worker.asleep.wait()
        assert asked[sql.FORGOTTEN_TOPICS] == 0

        async def deliver() -> None:
            count = len(got)
            enqueue(db)
            await until(lambda: len(got) > count and not run_of(worker).state.in_flight)

        for _ in range(3):
            await deliver()
        assert (asked[sql.FORGOTTEN_TOPICS], len(rows_of(db))) == (1, 3)
        Operator(db).set_retention("*", "sent", ZERO)
        run_of(worker).state.store._retention_read_at = -math.inf
        for _ in range(3):
            await deliver()
        assert (asked[sql.FORGOTTEN_TOPICS], len(rows_of(db))) == (2, 3)


async def test_concurrently_ending_handlers_all_know_the_rule(dsn: str, db: psycopg.Connection) -> None:
    Operator(db).set_retention("*", "sent", ZERO)
    store = Store(settings_for(dsn), worker="w")
    try:
        assert await asyncio.gather(*(store.forgotten_topics() for _ in range(5))) == [{"*"}] * 5
    finally:
        await store.close()


async def test_an_unreadable_rule_keeps_the_message_until_it_is_readable(
    outbox: Outbox, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    Operator(db).set_retention("*", "sent", ZERO)
    register(outbox, "async")
    fetch = WorkerConnection.fetch
    failures = [psycopg.OperationalError("gone"), psycopg.OperationalError("gone")]

    async def fail(self: WorkerConnection, statement: Any, parameters: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
        if statement == sql.FORGOTTEN_TOPICS and failures:
            raise failures.pop()
        return await fetch(self, statement, parameters, **options)

    monkeypatch.setattr(WorkerConnection, "fetch", fail)
    enqueue(db)
    worker = Worker(outbox)
    await worker.run_once()
    assert (failures, rows_of(db), worker.telemetry.counts[LogEvent.SENT]) == ([], [], 1)


async def test_a_deletion_with_a_lost_answer_ends_the_attempt(
    outbox: Outbox, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    Operator(db).set_retention("*", "sent", ZERO)
    got = register(outbox, "async")
    trip = WorkerConnection.trip
    losses = [psycopg.OperationalError("the answer is lost")]

    async def lose(self: WorkerConnection, steps: Sequence[Step]) -> list[list[Row]]:
        answer = await trip(self, steps)
        if losses and any(statement == statements.FORGET_SENT for statement, _ in steps):
            raise losses.pop()
        return answer

    monkeypatch.setattr(WorkerConnection, "trip", lose)
    message_id = enqueue(db)
    worker = Worker(outbox)
    await worker.run_once()
    assert (got, losses, rows_of(db)) == ([message_id], [], [])
    # It is no longer possible to know whether this attempt sent it.
    assert worker.telemetry.counts[LogEvent.LEASE_LOST] == 1


async def test_the_writes_of_a_handler_are_rolled_back_if_another_has_sent_the_message(
    outbox: Outbox, db: psycopg.Connection
) -> None:
    Operator(db).set_retention("*", "sent", ZERO)
    db.execute("CREATE TABLE written (id bigint)")

    @outbox.handler("greet", transactional=True)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute("INSERT INTO written VALUES (1)")
        lapse(db, message.id)
        claim(db, worker="another")
        assert forget_sent(db, (message.id, 2), worker="another") == {message.id}

    enqueue(db)
    worker = Worker(outbox)
    await worker.run_once()
    assert rows_of(db) == []
    assert db.execute("SELECT count(*) FROM written").fetchone() == (0,)
    assert worker.telemetry.counts[LogEvent.SENT] == 0


# --- killed processes -------------------------------------------------------------------------------------------------


def deliver_and_die(dsn: str, point: str) -> None:
    """Start a worker process that ends at one point of the first message's processing, like after a SIGKILL."""
    outbox = Outbox(settings_for(dsn))

    trip = Link.trip

    async def trip_and_die(self: Link, steps: Sequence[Step]) -> list[list[Row]]:
        finishes = any(statement is statements.FORGET_SENT for statement, _ in steps)
        if finishes and point == "before finish":
            os._exit(9)
        results = await trip(self, steps)
        if finishes:
            os._exit(9)
        return results

    @outbox.handler("greet")
    def greet(message: Message, ctx: SyncContext) -> None:
        if point == "before send":
            os._exit(9)

    Link.trip = trip_and_die  # type: ignore[method-assign] # dies at its finish, and is otherwise the same
    asyncio.run(Worker(outbox).run_once())


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before send", "before finish", "after finish"])
async def test_a_killed_worker_has_deleted_only_sent_messages(
    outbox: Outbox, dsn: str, db: psycopg.Connection, point: str
) -> None:
    Operator(db).set_retention("*", "sent", ZERO)
    message_id = enqueue(db)
    doomed = SPAWN.Process(target=deliver_and_die, args=(dsn, point), daemon=True)
    doomed.start()
    await asyncio.to_thread(doomed.join, 4 * PATIENCE_SECONDS)
    assert doomed.exitcode == 9
    await until(lambda: connection_count(db) == 0)
    if point == "after finish":
        assert rows_of(db) == []
        return
    assert state_of(db, message_id) == "sending"
    lapse(db, message_id)
    got = register(outbox, "async")
    await Worker(outbox).run_once()
    assert (got, rows_of(db)) == ([message_id], [])


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command, and return its stdout, or the errors of a refused command."""
    for variable in list(os.environ):
        if variable.startswith(ENVIRONMENT_PREFIX):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("PGOUTBOX_DSN", dsn)

    def run(*arguments: object, exit_code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == exit_code
        captured = capsys.readouterr()
        return captured.err if exit_code else captured.out

    return run


def test_rules_are_set_listed_and_removed(cli: Callable[..., str]) -> None:
    assert cli("retention") == "topic\tstate\tkeep\n"
    assert cli("retention", "set", "mail", "sent", "0") == "topic mail, sent: kept 0\n"
    assert cli("retention", "set", "mail", "failed", "forever") == "topic mail, failed: kept forever\n"
    cli("retention", "set", "*", "sent", "36h")
    assert json.loads(cli("retention", "set", "*", "dedupe_key", "30d", "--json")) == {
        "topic": "*",
        "state": "dedupe_key",
        "keep_seconds": 2_592_000.0,
    }
    assert cli("retention").splitlines()[1:] == [
        "mail\tfailed\tforever",
        "mail\tsent\t0",
        "*\tdedupe_key\t30d",
        "*\tsent\t36h",
    ]
    documents = [json.loads(line) for line in cli("retention", "--json").splitlines()]
    assert [document["keep_seconds"] for document in documents] == [None, 0.0, 2_592_000.0, 129_600.0]
    assert cli("retention", "unset", "mail", "sent") == "topic mail, sent: rule removed\n"
    assert json.loads(cli("retention", "unset", "mail", "sent", "--json"))["unset"] is False


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("mail", "pending", "1d"), "state='pending': must be one of"),
        (("No Topic", "sent", "1d"), "topic: must be 1 to 63"),
        (("mail", "sent", "-1d"), "'-1d'"),
        (("mail", "sent", "30"), "'30' is not a duration"),
        (("mail", "sent", "99999d"), "'99999d' is not a duration"),
    ],
)
def test_an_invalid_argument_is_named(cli: Callable[..., str], arguments: tuple[str, ...], named: str) -> None:
    assert named in cli("retention", "set", "--", *arguments, exit_code=2)


def test_prune_without_arguments_applies_the_rules(cli: Callable[..., str], db: psycopg.Connection) -> None:
    put(db, State.SENT, age=2 * DAY, dedupe_key="k")
    kept = put(db, State.SENT, age=DAY / 2)
    assert cli("prune") == "0 messages deleted\n"
    cli("retention", "set", "*", "sent", "1d")
    assert cli("prune") == "1 message deleted\n"
    assert [row.id for row in rows_of(db)] == [kept]
    assert json.loads(cli("prune", "--json")) == {
        "deleted": {"cancelled": 0, "failed": 0, "sent": 0, "skipped": 0},
        "key_heads": 0,
        "dedupe_keys": 0,
        "acts": 0,
        "partitions_dropped": 0,
    }


def test_filters_without_an_age_are_refused(cli: Callable[..., str], db: psycopg.Connection) -> None:
    assert "--older-than" in cli("prune", "--state", "sent", exit_code=2)
    assert "--older-than" in cli("prune", "--topic", "mail", exit_code=2)
