"""Tests a connection that is lost at any statement of an operation: before it, after it, or with its answer. The
operation has happened completely or not at all, the caller learns when that is uncertain, and the operation can be
repeated.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import psycopg
import pytest

from pgoutbox import EnqueuedMany, NewMessage, Outbox, migrate
from pgoutbox.database import operator_connection
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.message import Message, Permanent, Snooze, State, Transient
from pgoutbox.observability.events import LogEvent
from pgoutbox.operations import MessageFilter, Operator
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from tests.support.cuts import cuts, spread
from tests.support.messages import ADD_ATTEMPT, put
from tests.support.outbox_actions import attempts_of, enqueue, lapse, row_of, rows_of, settings_for
from tests.support.proxy import Proxy, proxy_to
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pgoutbox import Enqueued

AT_ONCE = RetryPolicy.steps(0, jitter=0)
MUCH_LATER = RetryPolicy.steps(3600, jitter=0)
MESSAGES_OF_A_BULK = 3


@pytest.mark.parametrize("length", [1, 12, 13, 300])
def test_a_long_scene_is_cut_at_both_ends_and_at_some_statements_between(length: int) -> None:
    numbers = spread(length, 12)
    assert numbers == sorted(set(numbers))
    assert len(numbers) == min(length, 12)
    assert {1, length} <= set(numbers) <= set(range(1, length + 1))


# --- producers --------------------------------------------------------------------------------------------------------


class Action(Protocol):
    """An action of a producer besides its own write, and a check of its effect."""

    def prepare(self, db: psycopg.Connection, key: str) -> None:
        """Commit the preconditions."""

    def act(self, outbox: Outbox, connection: psycopg.Connection, key: str) -> object:
        """Run the action in the transaction of this connection."""

    async def aact(self, outbox: Outbox, connection: psycopg.AsyncConnection, key: str) -> object:
        """Run the action on an async connection."""

    def rows(self, db: psycopg.Connection, key: str) -> int:
        """Return the number of messages that show its effect."""

    @property
    def all_rows(self) -> int:
        """Return that number after exactly one execution."""


def messages_of(db: psycopg.Connection, key: str, *states: State) -> int:
    """Count the messages in these states whose dedupe key is, or begins with, this text."""
    ((number,),) = db.execute(
        "SELECT count(*) FROM pgoutbox.message WHERE (dedupe_key = %(key)s OR dedupe_key LIKE %(key)s || '.%%') "
        "AND state = ANY (%(states)s)",
        {"key": key, "states": list(states)},
    ).fetchall()
    return int(number)


class EnqueueOne:
    """Enqueue one message."""

    all_rows = 1

    def prepare(self, db: psycopg.Connection, key: str) -> None:
        """Do nothing."""

    def act(self, outbox: Outbox, connection: psycopg.Connection, key: str) -> Enqueued | None:
        """Enqueue."""
        return outbox.on(connection).enqueue("greet", None, dedupe_key=key, require_transaction=False)

    async def aact(self, outbox: Outbox, connection: psycopg.AsyncConnection, key: str) -> Enqueued | None:
        """Enqueue."""
        return await outbox.on(connection).enqueue("greet", None, dedupe_key=key, require_transaction=False)

    def rows(self, db: psycopg.Connection, key: str) -> int:
        """Return the message."""
        return messages_of(db, key, State.PENDING)


class EnqueueAtBest(EnqueueOne):
    """Enqueue one message in a savepoint, so that the caller's transaction survives an error of the enqueue."""

    def act(self, outbox: Outbox, connection: psycopg.Connection, key: str) -> Enqueued | None:
        """Enqueue."""
        return outbox.on(connection).enqueue("greet", None, dedupe_key=key, best_effort=True)

    async def aact(self, outbox: Outbox, connection: psycopg.AsyncConnection, key: str) -> Enqueued | None:
        """Enqueue."""
        return await outbox.on(connection).enqueue("greet", None, dedupe_key=key, best_effort=True)


class EnqueueMany:
    """Enqueue in bulk."""

    all_rows = MESSAGES_OF_A_BULK

    def prepare(self, db: psycopg.Connection, key: str) -> None:
        """Do nothing."""

    def _items(self, key: str) -> list[NewMessage[object]]:
        return [NewMessage("greet", n, dedupe_key=f"{key}.{n}") for n in range(MESSAGES_OF_A_BULK)]

    def act(self, outbox: Outbox, connection: psycopg.Connection, key: str) -> EnqueuedMany:
        """Enqueue them."""
        return outbox.on(connection).enqueue_many(self._items(key), require_transaction=False)

    async def aact(self, outbox: Outbox, connection: psycopg.AsyncConnection, key: str) -> EnqueuedMany:
        """Enqueue them."""
        return await outbox.on(connection).enqueue_many(self._items(key), require_transaction=False)

    def rows(self, db: psycopg.Connection, key: str) -> int:
        """Return the messages."""
        return messages_of(db, key, State.PENDING)


class Cancel:
    """Cancel an existing message."""

    all_rows = 1

    def prepare(self, db: psycopg.Connection, key: str) -> None:
        """Enqueue the message."""
        enqueue(db, dedupe_key=key)

    def act(self, outbox: Outbox, connection: psycopg.Connection, key: str) -> str:
        """Cancel it."""
        return outbox.on(connection).cancel(topic="greet", dedupe_key=key, require_transaction=False)

    async def aact(self, outbox: Outbox, connection: psycopg.AsyncConnection, key: str) -> str:
        """Cancel it."""
        return await outbox.on(connection).cancel(topic="greet", dedupe_key=key, require_transaction=False)

    def rows(self, db: psycopg.Connection, key: str) -> int:
        """Return the message, cancelled."""
        return messages_of(db, key, State.CANCELLED)


ACTIONS: Mapping[str, Action] = {
    "enqueue": EnqueueOne(),
    "enqueue at best": EnqueueAtBest(),
    "enqueue many": EnqueueMany(),
    "cancel": Cancel(),
}
ORDER = "INSERT INTO orders (key) VALUES (%s) ON CONFLICT DO NOTHING"


def in_transaction(outbox: Outbox, dsn: str, action: Action, key: str) -> object:
    """Run the business's write and the action in one transaction."""
    with psycopg.connect(dsn) as connection:
        connection.execute(ORDER, [key])
        return action.act(outbox, connection, key)  # The block commits, and tolerates a lost connection.


def in_pipeline(outbox: Outbox, dsn: str, action: Action, key: str) -> object:
    """Run the same in a pipeline, where the caller has sent more before the first answer arrives."""
    with psycopg.connect(dsn) as connection, connection.pipeline(), connection.transaction():
        connection.execute(ORDER, [key])
        done = action.act(outbox, connection, key)
        connection.execute("SELECT 1")
        connection.execute("SELECT 2")
        return done


def by_itself(outbox: Outbox, dsn: str, action: Action, key: str) -> object:
    """Run the action alone, which commits by itself."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        return action.act(outbox, connection, key)


def in_async_transaction(outbox: Outbox, dsn: str, action: Action, key: str) -> object:
    """Run the business's write and the action in one transaction of an async connection."""

    async def run() -> object:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await connection.execute(ORDER, [key])
            return await action.aact(outbox, connection, key)

    return asyncio.run(run())


WAYS: Mapping[str, Callable[[Outbox, str, Action, str], object]] = {
    "sync": in_transaction,
    "async": in_async_transaction,
    "pipeline": in_pipeline,
    "autocommit": by_itself,
}
PRODUCED = [(way, action) for way in WAYS for action in ACTIONS if (way, action) != ("autocommit", "enqueue at best")]


@pytest.mark.parametrize(("way", "doing"), PRODUCED)
def test_a_producer_action_commits_with_its_business_or_not_at_all_and_is_repeatable(
    proxy: Proxy, dsn: str, db: psycopg.Connection, way: str, doing: str
) -> None:
    outbox, action, with_business = Outbox(settings_for(dsn)), ACTIONS[doing], way != "autocommit"
    db.execute("CREATE TABLE orders (key text PRIMARY KEY)")

    def play(name: str) -> object:
        action.prepare(db, name)
        return WAYS[way](outbox, proxy.dsn, action, name)

    for cut in cuts(proxy, play):
        key = f"{cut.moment.name.lower()}-{cut.number}"
        assert cut.error is not None, cut
        rows = action.rows(db, key)
        is_committed = rows == action.all_rows
        assert rows in (0, action.all_rows), cut
        orders = db.execute("SELECT FROM orders WHERE key = %s", [key]).rowcount
        assert orders == (is_committed and with_business), cut
        assert not (is_committed and cut.is_in_time), cut
        assert is_committed or not cut.is_too_late, cut
        answer = WAYS[way](outbox, dsn, action, key)
        if doing.startswith("enqueue"):
            answers = answer if isinstance(answer, EnqueuedMany) else [cast("Enqueued", answer)]
            assert [again.duplicate for again in answers] == [is_committed] * action.all_rows, cut
        assert action.rows(db, key) == action.all_rows, cut


# --- workers ----------------------------------------------------------------------------------------------------------


class Postman:
    """An outbox whose handlers end in every way, and record their messages."""

    def __init__(self, dsn: str) -> None:
        self.outbox = Outbox(settings_for(dsn))
        self.handed: list[int] = []
        outbox = self.outbox

        @outbox.handler("sent")
        async def send(message: Message, ctx: Context) -> None:
            self.handed.append(message.id)

        @outbox.handler("retry", retry=MUCH_LATER)
        async def put_off(message: Message, ctx: Context) -> Transient:
            self.handed.append(message.id)
            return Transient("busy")

        @outbox.handler("failed")
        def refuse(message: Message, ctx: SyncContext) -> Permanent:
            self.handed.append(message.id)
            return Permanent("refused")

        @outbox.handler("snoozed")
        async def snooze(message: Message, ctx: Context) -> Snooze:
            self.handed.append(message.id)
            return Snooze(3600)


# The resulting state and the recorded history of each outcome.
ENDS: Mapping[str, tuple[str, list[tuple[str, str | None]]]] = {
    "sent": ("sent", []),
    "retry": ("pending", [("retry", "busy")]),
    "failed": ("failed", [("failed", "refused")]),
    "snoozed": ("pending", [("snoozed", None)]),
}


def test_a_worker_hands_over_once_after_any_cut_and_releases_unanswered_claims(
    proxy: Proxy, db: psycopg.Connection
) -> None:
    through_proxy = Postman(proxy.dsn)
    ids: list[int] = []
    worker = Worker(through_proxy.outbox)

    def play(name: str) -> None:
        nonlocal worker
        # A key makes the worker query for successors as well.
        ids[:] = [enqueue(db, topic=topic, coalesce_key=f"{topic}-{name}", max_attempts=2) for topic in ENDS]
        through_proxy.handed.clear()
        worker = Worker(through_proxy.outbox)
        asyncio.run(worker.run_once())

    fates = set()
    for cut in cuts(proxy, play):
        rows, handed = rows_of(db, *ids), through_proxy.handed
        if cut.error is not None:
            fate = "refused to start"
            assert [(row.state, row.attempt_count) for row in rows] == [("pending", 0)] * len(ENDS), cut
            assert handed == [], cut
        else:
            lost_count = worker.telemetry.counts[LogEvent.CLAIM_LOST]
            fate = "lost its claim" if lost_count else "went on"
            released = [(1, "released", None)] * lost_count
            assert sorted(handed) == ids, cut
            for row, (state, attempts) in zip(rows, ENDS.values(), strict=True):
                assert (row.state, row.attempt_count, row.max_attempts) == (
                    state,
                    1 + lost_count,
                    2 + lost_count + (state == "pending" and attempts[0][0] == "snoozed"),
                ), cut
                assert attempts_of(db, row.id) == [*released, *((1 + lost_count, *a) for a in attempts)], cut
            assert worker.telemetry.counts[LogEvent.LEASE_LOST] == 0, cut
            assert worker.telemetry.counts[LogEvent.SENT] == 1, cut
        fates.add(fate)
        # A delayed or failed message must not reach the next run.
        db.execute("DELETE FROM pgoutbox.message_live")
    assert fates == {"refused to start", "lost its claim", "went on"}


class Clerk:
    """An outbox whose handlers write to the database, or check their lease before an external effect."""

    def __init__(self, dsn: str) -> None:
        self.outbox = Outbox(settings_for(dsn))
        self.sent: list[int] = []
        outbox = self.outbox

        @outbox.handler("async", transactional=True, retry=AT_ONCE)
        async def write(message: Message, ctx: Context) -> None:
            await ctx.connection.execute("INSERT INTO effect (message_id) VALUES (%s)", [message.id])

        @outbox.handler("sync", transactional=True, retry=AT_ONCE)
        def write_in_thread(message: Message, ctx: SyncContext) -> None:
            ctx.connection.execute("INSERT INTO effect (message_id) VALUES (%s)", [message.id])

        @outbox.handler("shared", transactional=True, max_size=10, retry=AT_ONCE)
        async def write_each(message: Message, ctx: Context) -> None:
            await write(message, ctx)

        @outbox.batch_handler("batch", transactional=True, retry=AT_ONCE)
        def write_all(messages: Sequence[Message], contexts: Sequence[SyncContext]) -> None:
            for message, ctx in zip(messages, contexts, strict=True):
                write_in_thread(message, ctx)

        @outbox.handler("careful", retry=AT_ONCE)
        async def make_sure(message: Message, ctx: Context) -> None:
            await ctx.ensure_lease()
            await asyncio.to_thread(self.write_apart, message.id)

        self._direct = ""

    def write_apart(self, message_id: int) -> None:
        """Record an effect that the completion does not commit."""
        with psycopg.connect(self._direct) as connection:
            connection.execute("INSERT INTO effect (message_id) VALUES (%s)", [message_id])

    def with_effects_in(self, dsn: str) -> Clerk:
        """Return the place of effects apart from the completion."""
        self._direct = dsn
        return self


@pytest.mark.parametrize("topic", ["async", "sync", "careful"])
def test_handler_writes_with_the_completion_or_after_a_lease_check_happen_once(
    proxy: Proxy, dsn: str, db: psycopg.Connection, topic: str
) -> None:
    db.execute("CREATE TABLE effect (message_id bigint)")
    through_proxy, direct = Clerk(proxy.dsn).with_effects_in(dsn), Clerk(dsn).with_effects_in(dsn)
    message_id = 0

    def play(name: str) -> None:
        nonlocal message_id
        message_id = enqueue(db, topic=topic)
        asyncio.run(Worker(through_proxy.outbox).run_once())

    def effects() -> int:
        return db.execute("SELECT FROM effect WHERE message_id = %s", [message_id]).rowcount

    retried_count = 0
    for cut in cuts(proxy, play):
        row = row_of(db, message_id)
        if row.state != "sent":
            # Not begun, put back for a moment, or claimed without the worker's knowledge.
            assert (row.state, row.attempt_count) in {("pending", 0), ("pending", 1), ("sending", 1)}, cut
            outcomes = [outcome for _, outcome, _ in attempts_of(db, message_id)]
            # A lost session that ends slowly may still lock the message, and claims of the run skip it.
            is_locked = outcomes == ["retry"] and cut.statement in {"COMMIT", "SELECT pgoutbox._reset_session()"}
            assert is_locked or outcomes in ([], ["snoozed"]), cut
            assert effects() == 0, cut
            lapse(db, message_id)
            db.execute("UPDATE pgoutbox.message SET available_at = now() WHERE id = %s", [message_id])
            asyncio.run(Worker(direct.outbox).run_once())
        row = row_of(db, message_id)
        assert (row.state, effects()) == ("sent", 1), cut
        # Another attempt may follow only an attempt that has written nothing.
        assert len(attempts_of(db, message_id)) == row.attempt_count - 1, cut
        retried_count += row.attempt_count == 2
    assert retried_count > 0


@pytest.mark.parametrize("topic", ["shared", "batch"])
def test_messages_that_share_a_transaction_are_written_together_and_once(
    proxy: Proxy, dsn: str, db: psycopg.Connection, topic: str
) -> None:
    db.execute("CREATE TABLE effect (message_id bigint)")
    through_proxy, direct = Clerk(proxy.dsn), Clerk(dsn)
    ids: list[int] = []

    def play(name: str) -> None:
        with db.transaction():
            ids[:] = [enqueue(db, topic=topic) for _ in range(3)]
        asyncio.run(Worker(through_proxy.outbox).run_once())

    def effects() -> list[int]:
        query = "SELECT message_id FROM effect WHERE message_id = ANY (%s) ORDER BY 1"
        return [message_id for (message_id,) in db.execute(query, [ids]).fetchall()]

    outcomes = set()
    for cut in cuts(proxy, play):
        if {row.state for row in rows_of(db, *ids)} != {"sent"}:
            # A session that ends slowly may still lock the messages, and a claim of the next run skips them.
            wait_until(lambda: not _in_transaction(db), lambda: "the lost session ends")
            rows = rows_of(db, *ids)
            # Those that were not locked may have been tried again in the same run.
            assert effects() == [row.id for row in rows if row.state == "sent"], cut
            left = [row.id for row in rows if row.state != "sent"]
            for message_id in left:
                lapse(db, message_id)
            db.execute("UPDATE pgoutbox.message SET available_at = now() WHERE id = ANY (%s)", [left])
            asyncio.run(Worker(direct.outbox).run_once())
        assert ({row.state for row in rows_of(db, *ids)}, effects()) == ({"sent"}, ids), cut
        outcomes |= {outcome for message_id in ids for _, outcome, _ in attempts_of(db, message_id)}
    assert "retry" in outcomes


def _in_transaction(db: psycopg.Connection) -> bool:
    query = (
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_xid IS NOT NULL"
    )
    return db.execute(query).rowcount > 0


# --- operators --------------------------------------------------------------------------------------------------------


def failed_messages(db: psycopg.Connection, topic: str) -> list[int]:
    """Create three messages that have failed after three of four attempts."""
    return [put(db, State.FAILED, topic=topic) for _ in range(3)]


def budgets(db: psycopg.Connection, ids: list[int]) -> list[tuple[str, int, int]]:
    """Return state, attempts made and attempts allowed."""
    return [(row.state, row.attempt_count, row.max_attempts) for row in rows_of(db, *ids)]


AS_IT_FAILED, AS_REDRIVEN = ("failed", 3, 4), ("pending", 3, 7)


def test_a_redrive_covers_all_its_messages_or_none_and_is_repeatable(
    proxy: Proxy, dsn: str, db: psycopg.Connection
) -> None:
    ids: list[int] = []

    def redrive(dsn: str) -> None:
        with operator_connection.connect(settings_for(dsn)) as connection:
            list(Operator(connection).bulk("redrive", ids))

    def play(name: str) -> None:
        ids[:] = failed_messages(db, "mail")
        redrive(proxy.dsn)

    for cut in cuts(proxy, play):
        assert cut.error is not None, cut
        found = budgets(db, ids)
        assert found in ([AS_IT_FAILED] * 3, [AS_REDRIVEN] * 3), cut
        assert found == [AS_IT_FAILED] * 3 or not cut.is_in_time, cut
        assert found == [AS_REDRIVEN] * 3 or not cut.is_too_late, cut
        redrive(dsn)
        assert budgets(db, ids) == [AS_REDRIVEN] * 3, cut


def test_an_interrupted_redrive_of_everything_resumes_after_the_last_full_batch(
    proxy: Proxy, dsn: str, db: psycopg.Connection
) -> None:
    ids: list[int] = []
    topic = ""

    def redrive(dsn: str) -> None:
        with operator_connection.connect(settings_for(dsn)) as connection:
            list(Operator(connection).bulk("redrive", MessageFilter(topic=topic), batch_size=1))

    def play(name: str) -> None:
        nonlocal topic
        topic = f"mail.{name}"
        ids[:] = failed_messages(db, topic)
        redrive(proxy.dsn)

    done_counts = set()
    for cut in cuts(proxy, play):
        assert cut.error is not None, cut
        found = budgets(db, ids)
        done_count = found.count(AS_REDRIVEN)
        assert found == [AS_REDRIVEN] * done_count + [AS_IT_FAILED] * (3 - done_count), cut
        done_counts.add(done_count)
        redrive(dsn)
        assert budgets(db, ids) == [AS_REDRIVEN] * 3, cut
    assert done_counts == {0, 1, 2, 3}


def test_a_resend_makes_one_copy_that_names_its_source_or_none(proxy: Proxy, db: psycopg.Connection) -> None:
    source_id = 0

    def play(name: str) -> None:
        nonlocal source_id
        db.execute("DELETE FROM pgoutbox.message_live")
        source_id = put(db, State.SENT, topic="mail", coalesce_key=name)
        with operator_connection.connect(settings_for(proxy.dsn)) as connection:
            Operator(connection).resend(source_id)

    for cut in cuts(proxy, play):
        assert cut.error is not None, cut
        copies = db.execute("SELECT state, resend_of FROM pgoutbox.message_live").fetchall()
        assert copies in ([], [("pending", source_id)]), cut
        assert copies == [] or not cut.is_in_time, cut
        assert copies != [] or not cut.is_too_late, cut
        assert row_of(db, source_id).state == "sent", cut


def test_a_prune_deletes_messages_with_their_related_rows_and_resumes_after_a_cut(
    proxy: Proxy, dsn: str, db: psycopg.Connection
) -> None:
    topic = ""

    def prune(dsn: str) -> None:
        with operator_connection.connect(settings_for(dsn)) as connection:
            Operator(connection).prune(timedelta(hours=1), topic=topic, batch_size=2)

    def play(name: str) -> None:
        nonlocal topic
        topic = f"mail.{name}"
        db.execute("DELETE FROM pgoutbox.message_live")
        for key in ("a", "b", "c"):
            message_id = put(db, State.SENT, topic=topic, dedupe_key=key, coalesce_key=key, age=timedelta(days=1))
            db.execute(ADD_ATTEMPT, [message_id, 1])
        enqueue(db)  # A key is deleted when its newest message is older than the oldest existing message.
        prune(proxy.dsn)

    def left() -> list[set[int]]:
        return [
            {row[0] for row in db.execute(query)}
            for query in (
                "SELECT id FROM pgoutbox.message WHERE state = 'sent'",
                "SELECT message_id FROM pgoutbox.attempt_view",
                "SELECT message_id FROM pgoutbox.dedupe",
            )
        ]

    left_counts = set()
    for cut in cuts(proxy, play):
        assert cut.error is not None, cut
        messages, attempts, dedupes = left()
        assert messages == attempts == dedupes, cut
        left_counts.add(len(messages))
        prune(dsn)
        assert left() == [set(), set(), set()], cut
        assert db.execute("SELECT FROM pgoutbox.key_head").rowcount == 0, cut
    assert left_counts == {3, 1, 0}


# --- schema -----------------------------------------------------------------------------------------------------------

CATALOG = """
    SELECT 'relation', c.relname, c.relkind::text FROM pg_class AS c
    WHERE c.relnamespace = to_regnamespace('pgoutbox')
    UNION ALL
    SELECT 'function', p.oid::regprocedure::text, md5(pg_get_functiondef(p.oid)) FROM pg_proc AS p
    WHERE p.pronamespace = to_regnamespace('pgoutbox')
    UNION ALL
    SELECT 'schema', n.nspname, obj_description(n.oid, 'pg_namespace') FROM pg_namespace AS n
    WHERE n.nspname = 'pgoutbox'
    ORDER BY 1, 2
"""


@pytest.mark.parametrize("direction", ["up", "down"])
def test_an_interrupted_migration_leaves_the_old_or_the_new_schema_and_is_repeatable(
    empty_dsn: str, tmp_path: Path, direction: str
) -> None:
    def migrate_by(dsn: str, direction: str) -> None:
        if direction == "up":
            migrate.upgrade(dsn)
        else:
            migrate.downgrade(dsn, "base")

    def catalog() -> list[tuple[str, str, str]]:
        return db.execute(CATALOG).fetchall()

    def play(name: str) -> None:
        # The next run begins with the state that the cut left.
        if catalog() != old:
            migrate_by(empty_dsn, "down" if direction == "up" else "up")
        migrate_by(proxy.dsn, direction)

    with proxy_to(empty_dsn, tmp_path) as proxy, psycopg.connect(empty_dsn, autocommit=True) as db:
        old, new = catalog(), []
        migrate.upgrade(empty_dsn)
        if direction == "up":
            new = catalog()
            assert new
        else:
            old = catalog()
        for cut in cuts(proxy, play, at_most=8):
            found = catalog()
            assert cut.error is not None, cut
            assert found in (old, new), cut
            assert found == old or not cut.is_in_time, cut
            assert found == new or not cut.is_too_late, cut
            if found == new:
                migrate_by(empty_dsn, direction)
                assert catalog() == new, cut
        assert catalog() == new
