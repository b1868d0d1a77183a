"""Tests that keys without messages are pruned page by page, and that a needed key stays, whatever commits
concurrently.

Each scenario of a guard runs twice: with the functions of the schema, where it must hold, and without the guard,
where it must fail.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import psycopg
import pytest

from pgoutbox.database import sql
from pgoutbox.message import State
from pgoutbox.operations import ActResult, Operator
from pgoutbox.operations.retention import MaintenanceRun, PartitionCache, read_maintenance_facts
from tests.support import races
from tests.support.messages import put
from tests.support.outbox_actions import enqueue, row_of, until_blocked
from tests.support.partitions import add_partition
from tests.support.worker_sql import claim, finish_sent, ids_in_flight

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgoutbox import Outbox
    from tests.conftest import Connect

DAY = timedelta(days=1)


class Page(NamedTuple):
    """The result of one page."""

    last_scope: str
    last_key: str
    key_count: int
    forgotten_count: int


def page(db: psycopg.Connection, *, limit: int = 100, after: tuple[str, str] = ("", "")) -> Page | None:
    row = db.execute(sql.PRUNE_KEYS, {"limit": limit, "after_scope": after[0], "after_key": after[1]}).fetchone()
    return None if row is None else Page(*row)


def keys(db: psycopg.Connection) -> list[str]:
    return [key for (key,) in db.execute("SELECT key FROM pgoutbox.key_head ORDER BY key")]


def delete(db: psycopg.Connection, *ids: int) -> None:
    """Prune like retention."""
    db.execute("DELETE FROM pgoutbox.message WHERE id = ANY (%s)", [list(ids)])


def remove(db: psycopg.Connection, function: str, guard: str, instead: str = "") -> None:
    """Remove a guard from a function of the schema."""
    ((definition,),) = db.execute("SELECT pg_get_functiondef(%s::regproc)", [f"pgoutbox.{function}"]).fetchall()
    assert definition.count(guard) == 1
    db.execute(definition.replace(guard, instead).encode())


FAILED_COALESCED = "AND m.coalesce_key = key\n"
CANCELLED_COALESCED = "AND m.coalesce_key = key AND m.state = 'cancelled'"
OLDEST = "SELECT o.topic, o.coalesce_key FROM oldest AS o WHERE o.coalesce_key IS NOT NULL"
HORIZON = "e.newest_id <= coalesce"
NEWEST_EXISTS = "WHERE m.id = p.newest_id"
NEVER = " AND false"

FAILED_ORDERED = "FROM pgoutbox.message_failed AS m\nWHERE scope LIKE '/%'"
CANCELLED_ORDERED = "AND m.ordering_key = key AND m.state = 'cancelled'"
LIVE_ORDERED = "FROM pgoutbox.message_live AS m\nWHERE scope LIKE '/%'"


# --- reasons to keep a key --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize(("state", "guard"), [(State.FAILED, FAILED_COALESCED), (State.CANCELLED, CANCELLED_COALESCED)])
def test_an_older_message_cannot_be_redriven_after_the_newest_one_is_deleted(
    db: psycopg.Connection, state: State, guard: str, *, is_guarded: bool
) -> None:
    if not is_guarded:
        remove(db, "_messages_of_key", guard, guard.rstrip() + NEVER + "\n")
    older = put(db, state, coalesce_key="k", age=9 * DAY)
    other, newest = (put(db, State.SENT, coalesce_key=key) for key in ("other", "k"))
    delete(db, other, newest)
    assert page(db) == ("mail", "other", 2, 1 if is_guarded else 2)
    answer = Operator(db).redrive(older)
    assert (answer.result is ActResult.REDRIVEN) is not is_guarded
    assert answer.other_id == (newest if is_guarded else None)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_an_older_message_is_not_delivered_after_the_newest_one_is_deleted(
    db: psycopg.Connection, *, is_guarded: bool
) -> None:
    if not is_guarded:
        remove(db, "_prune_keys", OLDEST, OLDEST + NEVER)
    older = enqueue(db, coalesce_key="k")
    newest, other = enqueue(db, coalesce_key="k"), enqueue(db, coalesce_key="other")
    delete(db, newest, other)
    answer = page(db)
    assert answer is not None
    assert answer.forgotten_count == (1 if is_guarded else 2)
    assert ids_in_flight(claim(db)) == ([] if is_guarded else [older])
    assert row_of(db, older).state == ("skipped" if is_guarded else "sending")


@pytest.mark.parametrize("is_guarded", [True, False])
def test_heads_newer_than_the_live_messages_of_a_batch_stay(db: psycopg.Connection, *, is_guarded: bool) -> None:
    if not is_guarded:
        remove(db, "_prune_keys", HORIZON, "true OR " + HORIZON)
    for _ in range(10):
        enqueue(db)
    older = enqueue(db, coalesce_key="k")
    newest, later = enqueue(db, coalesce_key="k"), enqueue(db, coalesce_key="later")
    delete(db, newest, later)
    page(db, limit=1)
    page(db, limit=1, after=("greet", "k"))
    assert keys(db) == (["k", "later"] if is_guarded else [])
    page(db, limit=2)
    assert keys(db) == (["k"] if is_guarded else [])
    assert row_of(db, older).state == "pending"


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize("state", [State.SENT, State.SKIPPED])
def test_the_head_stays_while_its_newest_message_exists(
    db: psycopg.Connection, state: State, *, is_guarded: bool
) -> None:
    if not is_guarded:
        remove(db, "_prune_keys", NEWEST_EXISTS, NEWEST_EXISTS + NEVER)
    add_partition(db, 40)
    newest = put(db, state, coalesce_key="k", age=40 * DAY)
    page(db)
    assert keys(db) == (["k"] if is_guarded else [])
    if state is State.SENT and is_guarded:
        assert Operator(db).resend(newest).is_done
    if state is State.SENT and not is_guarded:
        assert Operator(db).resend(newest).result is ActResult.SUPERSEDED


RESEND_NEWEST = "OR newest_id = source.id THEN"


@pytest.mark.parametrize("is_guarded", [True, False])
def test_an_older_message_cannot_be_resent_after_its_head_is_pruned(
    db: psycopg.Connection, *, is_guarded: bool
) -> None:
    if not is_guarded:
        remove(db, "resend", RESEND_NEWEST, "OR coalesce(newest_id <= source.id, true) THEN")
    older, newest = (put(db, State.SENT, coalesce_key="k") for _ in range(2))
    delete(db, newest)
    page(db)
    assert keys(db) == []
    if is_guarded:
        answer = Operator(db).resend(older)
        assert answer.explanation == "is superseded by a newer message, which is deleted"
    else:
        assert Operator(db).resend(older).is_done


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize(
    ("state", "guard", "broken"),
    [
        pytest.param(State.PENDING, LIVE_ORDERED, LIVE_ORDERED + NEVER, id="live"),
        pytest.param(State.FAILED, FAILED_ORDERED, FAILED_ORDERED + NEVER, id="failed"),
        pytest.param(State.CANCELLED, CANCELLED_ORDERED, CANCELLED_ORDERED + NEVER, id="cancelled"),
    ],
)
def test_a_producer_with_an_early_id_is_ordered_after_earlier_commits(
    db: psycopg.Connection, connect: Connect, state: State, guard: str, broken: str, *, is_guarded: bool
) -> None:
    """It waits for the transaction with its dedupe key, between drawing its id and writing the row of its key."""
    if not is_guarded:
        remove(db, "_prune_keys", NEWEST_EXISTS, NEWEST_EXISTS + NEVER)
        remove(db, "_messages_of_key", guard, broken)
    rival, producer = connect(), connect(autocommit=True)
    put(rival, dedupe_key="d")
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(put, producer, ordering_key="k", dedupe_key="d")
        races.until_blocked(db, producer, late)
        earlier, last, other = (put(db, ordering_key=key) for key in ("k", "k", "other"))
        if state is not State.PENDING:
            db.execute(
                "UPDATE pgoutbox.message SET state = %s, finished_at = now(), attempt_count = 1 WHERE id = %s",
                [state.value, earlier],
            )
        delete(db, last, other)
        page(db)
        assert keys(db) == (["k"] if is_guarded else [])
        rival.rollback()
        assert (late.result() > earlier) is is_guarded


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_producer_with_an_early_id_supersedes_earlier_commits(
    db: psycopg.Connection, connect: Connect, *, is_guarded: bool
) -> None:
    if not is_guarded:
        remove(db, "resend", RESEND_NEWEST, "OR coalesce(newest_id <= source.id, true) THEN")
    rival, producer = connect(), connect(autocommit=True)
    put(rival, dedupe_key="d")
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(put, producer, coalesce_key="k", dedupe_key="d")
        races.until_blocked(db, producer, late)
        sent, newest = (put(db, State.SENT, coalesce_key="k") for _ in range(2))
        delete(db, newest)
        page(db)
        rival.rollback()
        assert late.result() < sent
    if not is_guarded:
        assert Operator(db).resend(sent).is_done
        return
    assert Operator(db).resend(sent).other_id == late.result()
    assert ids_in_flight(claim(db, topics=["mail"])) == [late.result()]


def test_an_ordering_key_stays_while_its_last_message_exists(db: psycopg.Connection) -> None:
    sent = put(db, State.SENT, ordering_key="k")
    page(db)
    assert keys(db) == ["k"]
    delete(db, sent)
    page(db)
    assert keys(db) == []


def test_one_old_failed_message_does_not_keep_other_keys(db: psycopg.Connection) -> None:
    put(db, State.FAILED, coalesce_key="old", age=400 * DAY)
    put(db, State.FAILED, ordering_key="old", age=400 * DAY)
    put(db, State.SENT, age=400 * DAY)
    for number in range(5):
        delete(db, put(db, coalesce_key=f"k{number}"), put(db, ordering_key=f"k{number}"))
    assert Operator(db).prune(1000 * DAY).key_heads == 10
    assert keys(db) == ["old", "old"]


# --- races ------------------------------------------------------------------------------------------------------------

# A page stops here, after its snapshot and before it has read a row.
_LIMIT = "LIMIT at_most\n"
_GATE = "LIMIT at_most + length(pg_advisory_lock(4711)::text)\n"
_UNCHANGED = "WHERE head.newest_id = e.newest_id\n        AND"
_EACH_KEY = pytest.mark.parametrize(("name", "scope"), [("coalesce_key", "greet"), ("ordering_key", "/default")])


@pytest.mark.parametrize("is_guarded", [True, False])
@_EACH_KEY
async def test_a_key_whose_next_message_commits_during_a_prune_is_kept(
    connect: Connect, db: psycopg.Connection, name: str, scope: str, *, is_guarded: bool
) -> None:
    remove(db, "_prune_keys", _LIMIT, _GATE)
    if not is_guarded:
        remove(db, "_prune_keys", _UNCHANGED, "WHERE")
    gate, producer, pruner = connect(autocommit=True), connect(), connect(autocommit=True)
    delete(db, enqueue(db, **{name: "k"}))  # type: ignore[arg-type] # passed on
    gate.execute("SELECT pg_advisory_lock(4711)")
    enqueue(producer, **{name: "k"})  # type: ignore[arg-type] # passed on
    pruning = asyncio.create_task(asyncio.to_thread(page, pruner))
    await until_blocked(db, pruning)
    producer.commit()
    gate.execute("SELECT pg_advisory_unlock(4711)")
    assert await pruning == (scope, "k", 1, 0 if is_guarded else 1)
    assert keys(db) == (["k"] if is_guarded else [])


@_EACH_KEY
def test_a_key_locked_by_an_open_transaction_is_skipped(
    connect: Connect, db: psycopg.Connection, name: str, scope: str
) -> None:
    producer = connect()
    delete(db, enqueue(db, **{name: "k"}), enqueue(db, **{name: "free"}))  # type: ignore[arg-type] # passed on
    enqueue(producer, **{name: "k"})  # type: ignore[arg-type] # passed on
    answer = page(db)
    assert answer is not None
    assert (answer.key_count, answer.forgotten_count) == (2, 1)
    producer.commit()
    assert keys(db) == ["k"]


@pytest.mark.parametrize("commits", [True, False])
@_EACH_KEY
def test_a_producer_that_waits_for_the_deletion_of_its_key_recreates_it(
    connect: Connect, db: psycopg.Connection, name: str, scope: str, *, commits: bool
) -> None:
    pruner, producer = connect(), connect(autocommit=True)
    delete(db, enqueue(db, **{name: "k"}))  # type: ignore[arg-type] # passed on
    assert page(pruner) is not None
    with ThreadPoolExecutor(1) as threads:
        enqueued = threads.submit(lambda: enqueue(producer, **{name: "k"}))  # type: ignore[arg-type] # passed on
        races.until_blocked(db, producer, enqueued)
        if commits:
            pruner.commit()
        else:
            pruner.rollback()
        message_id = enqueued.result()
    assert db.execute("SELECT newest_id, scope FROM pgoutbox.key_head").fetchall() == [(message_id, scope)]


# --- pages ------------------------------------------------------------------------------------------------------------


@_EACH_KEY
def test_a_page_reads_and_deletes_only_its_keys(db: psycopg.Connection, name: str, scope: str) -> None:
    ids = [put(db, topic=place, queue=place, **{name: key}) for place, key in _SCOPED]  # type: ignore[arg-type]
    delete(db, *ids)
    after = ("", "")
    for place, key in _SCOPED:
        answer = page(db, limit=1, after=after)
        after = (f"/{place}" if scope == "/default" else place, key)
        assert answer == (*after, 1, 1)
    assert page(db, limit=1, after=after) is None
    assert keys(db) == []


_SCOPED = [("a", "1"), ("a", "2"), ("b", "1")]


@pytest.mark.slow
@_EACH_KEY
def test_the_cost_of_a_page_does_not_depend_on_the_table_size(
    connect: Connect, db: psycopg.Connection, name: str, scope: str
) -> None:
    for days_ago in (3, 2, 1):
        add_partition(db, days_ago)
    old, kept, live = (_fill(db, name, count) for count in (500, 500, 1_000))
    for state, ids in ((State.SENT, old), (State.FAILED, kept[:250]), (State.CANCELLED, kept[250:])):
        db.execute(
            "UPDATE pgoutbox.message SET state = %s, attempt_count = 1, worker = 'w', claimed_at = now(),"
            " finished_at = now() - interval '1 day' * (id %% 3) WHERE id = ANY (%s)",
            [state.value, ids],
        )
    delete(db, *old[::2])
    db.execute("ANALYZE")
    reader = connect()
    answer = page(reader, limit=20)
    assert answer is not None
    assert answer.key_count == 20
    read = reader.execute(
        "SELECT relname::text, seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE schemaname = 'pgoutbox'"
    ).fetchall()
    assert {relation for relation, sequentially, _ in read if sequentially} == set()
    fetched = {relation: by_index for relation, _, by_index in read if by_index}
    assert fetched.pop("message_live", 0) <= 10 * 20 + 20
    assert all(count <= 3 * 20 for count in fetched.values()), fetched
    assert len(live) == 1_000


def _fill(db: psycopg.Connection, name: str, count: int) -> list[int]:
    rows = db.execute(
        f"SELECT pgoutbox.enqueue('greet', '1', {name} => md5(i::text || random())) FROM generate_series(1, %s) AS i"
        .encode(),
        [count],
    )  # fmt: skip
    return [message_id for (message_id,) in rows]


def test_dedupe_keys_are_read_page_by_page(db: psycopg.Connection) -> None:
    for topic in "ab":
        for key in "12":
            delete(db, put(db, topic=topic, dedupe_key=key))
    kept = put(db, topic="b", dedupe_key="3")
    place = {"after_scope": "", "after_key": "", "limit": 2}
    pages: list[Page] = []
    while rows := db.execute(sql.PRUNE_DEDUPE_BY_RULE, place).fetchall():
        pages.append(Page(*rows[0]))
        place.update(after_scope=pages[-1].last_scope, after_key=pages[-1].last_key)
    assert pages == [("a", "2", 2, 2), ("b", "2", 2, 2), ("b", "3", 1, 0)]
    assert db.execute("SELECT message_id FROM pgoutbox.dedupe").fetchall() == [(kept,)]


def test_contents_are_read_page_by_page(db: psycopg.Connection) -> None:
    for number in range(3):
        db.execute(
            'SELECT FROM pgoutbox.enqueue_fanout(\'{"topic": "greet", "payload": {}}\', \'["tel:1"]\', %s)',
            [f'"{number}"'],
        )
    db.execute(
        "DELETE FROM pgoutbox.message AS m USING pgoutbox.content AS c WHERE m.content_id = c.id AND c.body <> '\"1\"'"
    )
    first = db.execute(sql.PRUNE_CONTENT, {"limit": 2, "after_key": ""}).fetchall()
    assert [row[2:] for row in first] == [(2, 1)]
    second = db.execute(sql.PRUNE_CONTENT, {"limit": 2, "after_key": first[0][1]}).fetchall()
    assert [row[2:] for row in second] == [(1, 1)]
    assert db.execute("SELECT body FROM pgoutbox.content").fetchall() == [("1",)]


class TestPlace:
    @pytest.fixture
    def memory(self, db: psycopg.Connection) -> PartitionCache:
        delete(db, *(put(db, **{name: key}) for name in ("coalesce_key", "ordering_key") for key in "abc"))  # type: ignore[arg-type]
        return PartitionCache()

    def test_the_next_round_continues_where_the_last_one_stopped(
        self, db: psycopg.Connection, memory: PartitionCache
    ) -> None:
        facts = read_maintenance_facts(db)
        forgotten = []
        for _ in range(9):
            turn = MaintenanceRun(facts, memory, batch_size=1, is_over=self._after(db, 1))
            assert turn.has_work
            turn.take(db)
            forgotten.append(turn.totals.key_heads)
            if not memory.passes:
                break
        assert sum(forgotten) == 6
        assert max(forgotten) == 1
        assert keys(db) == []
        assert not MaintenanceRun(facts, memory).has_work

    def test_a_lost_position_costs_another_pass(self, db: psycopg.Connection, memory: PartitionCache) -> None:
        MaintenanceRun(read_maintenance_facts(db), memory, batch_size=1, is_over=self._after(db, 1)).take(db)
        assert memory.passes
        MaintenanceRun(read_maintenance_facts(db), PartitionCache(), batch_size=1).take(db)
        assert keys(db) == []

    def _after(self, db: psycopg.Connection, count: int) -> Callable[[], bool]:
        """It is over when this many more keys are pruned."""
        left = len(keys(db)) - count
        return lambda: len(keys(db)) <= left


def test_a_key_is_pruned_after_the_usual_lifetime_of_its_messages(db: psycopg.Connection) -> None:
    Operator(db).set_retention("*", "sent", timedelta())
    message_id = enqueue(db, coalesce_key="k")
    claim(db)
    finish_sent(db, (message_id, 1))
    assert Operator(db).prune_by_retention().key_heads == 1
    assert keys(db) == []


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_redrive_takes_the_key_of_a_deleted_message_back_unless_it_is_kept(
    outbox: Outbox, db: psycopg.Connection, *, is_kept: bool
) -> None:
    first = put(db, State.CANCELLED, dedupe_key="k")
    second = outbox.on(db).enqueue("mail", {}, dedupe_key="k", require_transaction=False)
    db.execute("DELETE FROM pgoutbox.message WHERE id = %s", [second.id])
    db.execute("UPDATE pgoutbox.dedupe SET is_kept = %s", [is_kept])
    expected = ActResult.DEDUPE_KEY_TAKEN if is_kept else ActResult.REDRIVEN
    assert Operator(db).redrive(first).result is expected


@pytest.mark.parametrize("moved", range(4))
def test_of_messages_with_one_free_key_the_newest_gets_it(db: psycopg.Connection, moved: int) -> None:
    ids = [put(db, State.CANCELLED, dedupe_key="k") for _ in range(4)]
    # The order of the rows in the table is another one than that of their ids.
    db.execute("UPDATE pgoutbox.message SET finished_at = finished_at + interval '1 us' WHERE id = %s", [ids[moved]])
    db.execute("DELETE FROM pgoutbox.dedupe")
    (batch,) = Operator(db).bulk("redrive", ids)
    assert [(one.result, one.other_id) for one in batch.results] == [
        *[(ActResult.DEDUPE_KEY_TAKEN, ids[-1])] * 3,
        (ActResult.REDRIVEN, None),
    ]


def test_a_redrive_does_not_wait_for_a_key_that_another_transaction_has_locked(
    db: psycopg.Connection, connect: Connect
) -> None:
    first = put(db, State.CANCELLED, dedupe_key="k")
    second = put(db, dedupe_key="k")
    db.execute("DELETE FROM pgoutbox.message WHERE id = %s", [second])
    db.execute("SET statement_timeout = '10 s'")
    connect().execute("SELECT FROM pgoutbox.dedupe FOR UPDATE")
    assert Operator(db).redrive(first).result is ActResult.DEDUPE_KEY_TAKEN


def test_a_message_that_is_not_redriven_does_not_take_its_key_back(db: psycopg.Connection) -> None:
    older, _ = put(db, State.CANCELLED, coalesce_key="c", dedupe_key="k"), put(db, coalesce_key="c")
    db.execute("DELETE FROM pgoutbox.dedupe")
    assert Operator(db).redrive(older).result is ActResult.SUPERSEDED
    assert db.execute("SELECT FROM pgoutbox.dedupe").fetchall() == []
