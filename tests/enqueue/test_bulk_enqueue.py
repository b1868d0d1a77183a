"""Tests the SQL function enqueue_many across items: one key in several items, and two bulks at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as drawing
from hypothesis import strategies as st

from pgoutbox import NewMessage, Outbox
from pgoutbox.message import State
from tests.support import races
from tests.support.drafts import enqueue_many
from tests.support.messages import put
from tests.support.outbox_actions import row_of, state_of
from tests.support.worker_sql import claim, claim_ordered, finish_sent, ids_in_flight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conftest import Connect


class Item(NamedTuple):
    topic: str = "t"
    queue: str | None = None
    coalesce_key: str | None = None
    dedupe_key: str | None = None
    ordering_key: str | None = None
    payload: object = 1
    on_duplicate: str | None = None
    available_at: str | None = None


def enqueue(connection: psycopg.Connection, items: Sequence[Item]) -> list[tuple[int, int, bool]]:
    """Return the answers in the order of the items."""
    messages = [{name: value for name, value in item._asdict().items() if value is not None} for item in items]
    return enqueue_many(connection, *messages)


# --- one key in several items -----------------------------------------------------------------------------------------


def test_a_dedupe_key_twice_in_a_bulk_is_one_message(rolled_back: psycopg.Connection) -> None:
    answers = enqueue(rolled_back, [Item(dedupe_key="k"), Item(), Item(dedupe_key="k")])
    assert [duplicate for _, _, duplicate in answers] == [False, False, True]
    assert answers[0][1] == answers[2][1] != answers[1][1]
    assert rolled_back.execute("SELECT count(*) FROM pgoutbox.message").fetchone() == (2,)


@pytest.mark.parametrize("rule", [None, "error"])
def test_a_dedupe_key_twice_in_a_bulk_with_two_payloads_is_a_conflict(
    rolled_back: psycopg.Connection, rule: str | None
) -> None:
    with pytest.raises(psycopg.errors.UniqueViolation, match="another payload"), rolled_back.transaction():
        enqueue(rolled_back, [Item(dedupe_key="k"), Item(dedupe_key="k", payload=2, on_duplicate=rule)])
    assert rolled_back.execute("SELECT FROM pgoutbox.message").fetchall() == []


@pytest.mark.parametrize("exists", [False, True])
def test_another_payload_of_a_dedupe_key_in_a_bulk_is_ignored_if_asked(
    rolled_back: psycopg.Connection, exists: bool
) -> None:
    """The rule of the first item does not matter: it has nothing to ignore, unless the message existed before."""
    first = enqueue(rolled_back, [Item(dedupe_key="k", payload=2)])[0][1] if exists else None
    items = [
        Item(dedupe_key="k", payload=2),
        Item(dedupe_key="k", payload=3, on_duplicate="ignore"),
        Item(dedupe_key="k", payload=2, on_duplicate="error"),
        Item(dedupe_key="l", payload=3),
    ]
    answers = enqueue(rolled_back, items)
    assert [duplicate for _, _, duplicate in answers] == [exists, True, True, False]
    (known,) = {message_id for _, message_id, _ in answers[:3]}
    assert first in (None, known)
    assert rolled_back.execute("SELECT m.payload FROM pgoutbox.message AS m ORDER BY m.id").fetchall() == [(2,), (3,)]


def test_the_first_of_several_items_takes_a_freed_dedupe_key(rolled_back: psycopg.Connection) -> None:
    freed = put(rolled_back, State.CANCELLED, topic="t", dedupe_key="k")
    answers = enqueue(rolled_back, [Item(dedupe_key="k"), Item(dedupe_key="l"), Item(dedupe_key="k")])
    assert [duplicate for _, _, duplicate in answers] == [False, False, True]
    assert freed < answers[0][1] == answers[2][1]
    with pytest.raises(psycopg.errors.UniqueViolation):
        enqueue(rolled_back, [Item(dedupe_key="k", payload=2)])


@pytest.mark.parametrize("key", ["coalesce_key", "ordering_key"])
def test_a_duplicate_does_not_take_the_place_of_newer_messages_of_its_other_key(
    rolled_back: psycopg.Connection, key: str
) -> None:
    both = Item(dedupe_key="d")._replace(**{key: "k"})
    ((_, older, _),) = enqueue(rolled_back, [both])
    ((_, newer, _), (_, again, duplicate)) = enqueue(rolled_back, [Item()._replace(**{key: "k"}), both])
    assert (again, duplicate) == (older, True)
    heads = "SELECT head.newest_id FROM pgoutbox.key_head AS head"
    assert rolled_back.execute(heads).fetchall() == [(newer,)]
    assert enqueue(rolled_back, [both]) == [(0, older, True)]
    assert rolled_back.execute(heads).fetchall() == [(newer,)]


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_of_several_items_of_a_coalesce_key_the_last_one_is_owed(
    rolled_back: psycopg.Connection, is_scheduled: bool
) -> None:
    due_at = (datetime.now(UTC) + timedelta(days=1)).isoformat() if is_scheduled else None
    items = [Item(coalesce_key=key, payload=n, available_at=due_at) for n, key in enumerate("klkk")]
    older, other, old, newest = (message_id for _, message_id, _ in enqueue(rolled_back, items))
    heads = rolled_back.execute("SELECT head.scope, head.key, head.newest_id FROM pgoutbox.key_head AS head ORDER BY 2")
    assert heads.fetchall() == [("t", "k", newest), ("t", "l", other)]
    if is_scheduled:  # Otherwise their claim ends them.
        assert [row_of(rolled_back, i).superseded_by for i in (older, old)] == [newest, newest]
        assert {state_of(rolled_back, i) for i in (older, old)} == {"skipped"}
        rolled_back.execute("UPDATE pgoutbox.message_live SET available_at = now()")
    assert ids_in_flight(claim(rolled_back, topics=["t"])) == [other, newest]


def test_several_items_of_an_ordering_key_are_delivered_one_after_the_other(rolled_back: psycopg.Connection) -> None:
    items = [Item("ab"[n % 2], ordering_key="k", payload=n) for n in range(4)]
    ids = [message_id for _, message_id, _ in enqueue(rolled_back, items)]
    heads = rolled_back.execute("SELECT head.scope, head.key, head.newest_id FROM pgoutbox.key_head AS head")
    assert heads.fetchall() == [("/default", "k", ids[-1])]
    for message_id in ids:
        assert [row.id for row in claim_ordered(rolled_back, topics=["a", "b"])] == [message_id]
        finish_sent(rolled_back, (message_id, 1))


@pytest.mark.parametrize("key", ["coalesce_key", "ordering_key"])
def test_the_duplicates_of_a_bulk_that_waited_name_its_message(connect: Connect, key: str) -> None:
    """A bulk draws its ids, waits for a dedupe key, and then another transaction has a greater id of the other key."""
    holder, bulk, other, observer = connect(), connect(), connect(), connect(autocommit=True)
    enqueue(holder, [Item(dedupe_key="a")])
    both = Item(dedupe_key="b")._replace(**{key: "k"})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(enqueue, bulk, [both, Item(dedupe_key="a"), both])
        races.until_blocked(observer, bulk, waiting)
        ((_, meanwhile, _),) = enqueue(other, [Item()._replace(**{key: "k"})])
        other.commit()
        holder.rollback()
        first, second, again = waiting.result()
    bulk.commit()
    stored = observer.execute("SELECT m.dedupe_key, m.id FROM pgoutbox.message AS m WHERE m.dedupe_key IS NOT NULL")
    assert dict(stored.fetchall()) == {"a": second[1], "b": first[1]}
    assert first[1] > meanwhile
    assert again == (2, first[1], True)


@pytest.mark.parametrize("key", ["coalesce_key", "ordering_key"])
def test_messages_of_one_key_keep_the_order_of_the_items_with_any_dedupe_keys(
    rolled_back: psycopg.Connection, key: str
) -> None:
    """Several alternating keys, and enough of them that an unstable sort would mix equal ones."""
    items = [
        Item(dedupe_key=f"{(90 - number) * 7 % 101:03}")._replace(**{key: "cab"[number % 3]}) for number in range(90)
    ]
    answers = enqueue(rolled_back, items)
    assert [index for index, _, _ in answers] == list(range(90))
    for start in range(3):
        ids = [message_id for _, message_id, _ in answers[start::3]]
        assert ids == sorted(ids)
    deduped = rolled_back.execute("SELECT d.message_id FROM pgoutbox.dedupe AS d").fetchall()
    assert {message_id for (message_id,) in deduped} == {message_id for _, message_id, _ in answers}


def enqueue_by_python(connection: psycopg.Connection, items: Sequence[Item]) -> list[tuple[int, int, bool]]:
    messages = [
        NewMessage(i.topic, 1, queue=i.queue, coalesce_key=i.coalesce_key, ordering_key=i.ordering_key) for i in items
    ]
    answers = Outbox().on(connection).enqueue_many(messages)
    return [(index, answer.id, answer.duplicate) for index, answer in enumerate(answers)]


# --- order and locks --------------------------------------------------------------------------------------------------

TOPICS: Final = st.sampled_from("cab")
KEYS: Final = st.sampled_from("yx")
ORDERED_ITEMS: Final = st.tuples(TOPICS, st.sampled_from((None, "default", "bulk")), KEYS).map(
    lambda drawn: Item(drawn[0], drawn[1], ordering_key=drawn[2])
)
COALESCED_ITEMS: Final = st.tuples(TOPICS, KEYS).map(lambda drawn: Item(drawn[0], coalesce_key=drawn[1]))


@pytest.mark.slow
@pytest.mark.parametrize("enqueue_all", [enqueue, enqueue_by_python])
@drawing(items=st.lists(ORDERED_ITEMS | COALESCED_ITEMS | st.just(Item()), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_messages_of_one_key_have_ids_in_the_order_of_the_items_across_topics(
    rolled_back: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    enqueue_all: Callable[[psycopg.Connection, Sequence[Item]], list[tuple[int, int, bool]]],
    items: list[Item],
) -> None:
    """An ordering key belongs to its queue, a coalesce key to its topic. Python sends several statements."""
    monkeypatch.setattr("pgoutbox.enqueue.validation.CHUNK_ROWS", 5)
    ids_by_key: dict[tuple[str | None, ...], list[int]] = {}
    for index, message_id, _ in sorted(enqueue_all(rolled_back, items)):
        item = items[index]
        ordered = (item.queue or "default", item.ordering_key) if item.ordering_key else ()
        coalesced = (item.topic, item.coalesce_key) if item.coalesce_key else ()
        ids_by_key.setdefault((*ordered, "", *coalesced), []).append(message_id)
    for ids in ids_by_key.values():
        assert ids == sorted(ids)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(Item(coalesce_key="a"), Item(coalesce_key="b"), id="coalesce keys"),
        pytest.param(Item("a", coalesce_key="k"), Item("b", coalesce_key="k"), id="topics of coalesce keys"),
        pytest.param(Item(dedupe_key="a"), Item(dedupe_key="b"), id="dedupe keys"),
        pytest.param(Item("a", dedupe_key="k"), Item("b", dedupe_key="k"), id="topics of dedupe keys"),
        pytest.param(Item("b", dedupe_key="k"), Item("a", coalesce_key="k"), id="dedupe keys, then coalesce keys"),
        pytest.param(Item("b", dedupe_key="k"), Item("a", ordering_key="k"), id="dedupe keys, then ordering keys"),
        pytest.param(Item("b", ordering_key="k"), Item("a", coalesce_key="k"), id="ordering keys, then coalesce keys"),
        pytest.param(Item(ordering_key="a"), Item(ordering_key="b"), id="ordering keys"),
        pytest.param(Item("b", "q", ordering_key="a"), Item("a", "q", ordering_key="b"), id="ordering keys, topics"),
        pytest.param(Item(queue="a", ordering_key="k"), Item(queue="b", ordering_key="k"), id="queues"),
        pytest.param(Item(ordering_key="k"), Item(queue="e", ordering_key="k"), id="the default queue"),
        pytest.param(
            Item(queue="b", coalesce_key="a"), Item(queue="a", coalesce_key="b"), id="coalesce keys, whatever queues"
        ),
    ],
)
def test_every_bulk_locks_the_keys_in_one_order(connect: Connect, first: Item, second: Item) -> None:
    """A bulk that waits for the first key has not yet locked the second, so no two bulks wait for each other."""
    holder, bulk, other, observer = connect(), connect(), connect(), connect(autocommit=True)
    enqueue(holder, [first])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(enqueue, bulk, [second, first])
        races.until_blocked(observer, bulk, waiting)
        try:
            other.execute("SET LOCAL lock_timeout = '200ms'")
            enqueue(other, [second])
        finally:
            other.rollback()
            holder.rollback()
        assert sorted(index for index, _, _ in waiting.result()) == [0, 1]


@pytest.mark.parametrize("queues", [(None,), (None, "default"), (None, "bulk"), ("bulk", None, "bulk")])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_bulk_notifies_for_the_default_queue_too(
    connect: Connect, queues: tuple[str | None, ...], key: str | None
) -> None:
    listener, bulk = connect(autocommit=True), connect()
    listener.execute("LISTEN pgoutbox")
    for queue in ("default", "bulk"):
        listener.execute("SELECT pg_advisory_lock(1885826146, hashtext(%s))", [queue])
    enqueue(bulk, [Item(queue=queue, ordering_key=key) for queue in queues])
    bulk.execute("NOTIFY pgoutbox, 'the end'")
    bulk.commit()
    rung = []
    for ring in listener.notifies():
        if ring.payload == "the end":
            break
        rung.append(ring.payload)
    assert sorted(rung) == (["bulk", "default"] if "bulk" in queues else ["default"])


def test_a_bulk_of_duplicates_notifies_nobody(connect: Connect) -> None:
    listener, bulk = connect(autocommit=True), connect(autocommit=True)
    enqueue(bulk, [Item(dedupe_key="k")])
    listener.execute("LISTEN pgoutbox")
    listener.execute("SELECT pg_advisory_lock(1885826146, hashtext('default'))")
    enqueue(bulk, [Item(dedupe_key="k")] * 2)
    listener.execute("SELECT")  # Notifications arrive with its answer.
    assert list(listener.notifies(timeout=0)) == []


# --- plans ------------------------------------------------------------------------------------------------------------

SIZE: Final = 2_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "item_of",
    [
        lambda n: {"coalesce_key": f"{n // 2}", "delay": 60},
        lambda n: {"coalesce_key": f"{n // 2}", "delay": 60, "max_delay": 600},
        lambda n: {"ordering_key": f"{n // 2}"},
        lambda n: {"dedupe_key": f"{n}"},
        lambda n: {"dedupe_key": f"{n // 2}", "coalesce_key": f"{n // 2}"},
    ],
    ids=["coalesce", "debounce", "order", "dedupe", "two keys"],
)
def test_a_plan_that_was_made_for_empty_tables_reads_each_row_by_its_index(
    connect: Connect, db: psycopg.Connection, item_of: Callable[[int], dict[str, object]]
) -> None:
    """A session keeps its plans. A plan that scans a table for each item would take a minute for a large bulk."""
    db.execute("VACUUM ANALYZE")
    session = connect(autocommit=True)

    def enqueue_range(numbers: range) -> None:
        enqueue_many(session, *({"topic": "a", "payload": 1, **item_of(n)} for n in numbers))

    enqueue_range(range(-6, 0))
    enqueue_range(range(SIZE))
    with session.transaction():
        enqueue_range(range(SIZE))
        read = session.execute(
            "SELECT relname::text, seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables"
            " WHERE schemaname = 'pgoutbox' AND seq_tup_read + coalesce(idx_tup_fetch, 0) > 0"
        ).fetchall()
    assert read != []
    # The floor has one row, so no index is faster. A bulk reads it a few times, not for each item.
    floor_reads = sum(sequentially for relation, sequentially, _ in read if relation == "id_floor")
    assert floor_reads < 10, read
    assert [relation for relation, sequentially, _ in read if sequentially and relation != "id_floor"] == []
    assert all(by_index <= 10 * SIZE for _, _, by_index in read), read


# --- an old snapshot --------------------------------------------------------------------------------------------------


def test_an_old_snapshot_that_sees_a_deleted_key_finds_its_own_message(
    connect: Connect, db: psycopg.Connection
) -> None:
    """The transaction sees the deleted row and its own one beside each other."""
    old = enqueue(db, [Item(coalesce_key="k", dedupe_key="d")])[0][1]
    session = connect()
    session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    session.execute("SELECT FROM pgoutbox.message")
    db.execute("SELECT pgoutbox._erase(ARRAY[%s::bigint])", [old])
    own = enqueue(session, [Item(coalesce_key="k", dedupe_key="d", payload=2)])[0][1]
    assert own > old
    assert enqueue(session, [Item(coalesce_key="k", dedupe_key="d", payload=2)]) == [(0, own, True)]
    again = {"topic": "t", "payload": 3, "coalesce_key": "k", "delay": 60, "max_delay": 600}
    ((_, newest, duplicate),) = enqueue_many(session, again)
    assert (newest > own, duplicate) == (True, False)
    session.commit()
    assert db.execute("SELECT newest_id FROM pgoutbox.key_head").fetchall() == [(newest,)]


def test_an_old_snapshot_that_sees_a_deleted_wait_begins_a_new_one(connect: Connect, db: psycopg.Connection) -> None:
    debounced = {"topic": "t", "payload": 1, "coalesce_key": "k", "delay": 60, "max_delay": 600}
    ((_, old, _),) = enqueue_many(db, debounced)
    db.execute("UPDATE pgoutbox.key_head SET waiting_since = now() - interval '1 day'")
    session = connect()
    session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    session.execute("SELECT FROM pgoutbox.message")
    db.execute("SELECT pgoutbox._erase(ARRAY[%s::bigint])", [old])
    ((_, own, _),) = enqueue_many(session, debounced)
    due = session.execute("SELECT available_at - now() FROM pgoutbox.message WHERE id = %s", [own]).fetchone()
    assert due == (timedelta(seconds=60),)
