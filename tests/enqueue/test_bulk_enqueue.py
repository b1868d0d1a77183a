"""Tests the SQL function enqueue_many across items: arrays of different lengths, one key twice, and two bulks at
once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, LiteralString, NamedTuple

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as drawing
from hypothesis import strategies as st

from pgoutbox import NewMessage, Outbox
from tests.support import races

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conftest import Connect

OPTIONAL_ARRAYS: Final[dict[str, LiteralString]] = {
    "queues": "text[]",
    "destinations": "text[]",
    "coalesce_keys": "text[]",
    "dedupe_keys": "text[]",
    "available_ats": "timestamptz[]",
    "delays": "double precision[]",
    "expires_ats": "timestamptz[]",
    "headers": "jsonb[]",
    "max_attempts": "integer[]",
    "ordering_keys": "text[]",
    "on_failed": "text[]",
    "max_delays": "double precision[]",
}
ENQUEUE_MANY: Final[LiteralString] = """
SELECT m.item_index, m.id, m.duplicate
FROM pgoutbox.enqueue_many(
    topics => %(topics)s::text[],
    payloads => %(payloads)s::jsonb[],
    queues => %(queues)s::text[],
    coalesce_keys => %(coalesce_keys)s::text[],
    dedupe_keys => %(dedupe_keys)s::text[],
    ordering_keys => %(ordering_keys)s::text[]
) AS m
"""


class Item(NamedTuple):
    topic: str = "t"
    queue: str | None = None
    coalesce_key: str | None = None
    dedupe_key: str | None = None
    ordering_key: str | None = None
    payload: str = "1"


def given(column: list[str | None]) -> list[str | None] | None:
    """Pass NULL for an array that no item uses, like Python. Bulks with one kind of key have their own statement."""
    return None if column.count(None) == len(column) else column


def enqueue(connection: psycopg.Connection, items: Sequence[Item]) -> list[tuple[int, int, bool]]:
    """Return the answers in the order of their arrival."""
    topics, queues, coalesce_keys, dedupe_keys, ordering_keys, payloads = map(list, zip(*items, strict=True))
    parameters = {
        "topics": topics,
        "payloads": payloads,
        "queues": given(queues),
        "coalesce_keys": given(coalesce_keys),
        "dedupe_keys": given(dedupe_keys),
        "ordering_keys": given(ordering_keys),
    }
    return connection.execute(ENQUEUE_MANY, parameters).fetchall()


@pytest.mark.parametrize("name", OPTIONAL_ARRAYS)
def test_no_array_may_have_more_elements_than_there_are_topics(rolled_back: psycopg.Connection, name: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="no other array may have more elements"):
        rolled_back.execute(
            "SELECT FROM pgoutbox.enqueue_many(ARRAY['t'], ARRAY['1'::jsonb],"
            f" {name} => ARRAY[NULL, NULL]::{OPTIONAL_ARRAYS[name]})".encode()
        )


def test_a_dedupe_key_twice_in_a_bulk_is_one_message(rolled_back: psycopg.Connection) -> None:
    answers = sorted(enqueue(rolled_back, [Item(dedupe_key="k"), Item(), Item(dedupe_key="k")]))
    assert [duplicate for _, _, duplicate in answers] == [False, False, True]
    assert answers[0][1] == answers[2][1] != answers[1][1]
    assert rolled_back.execute("SELECT count(*) FROM pgoutbox.message").fetchone() == (2,)


def test_a_dedupe_key_twice_in_a_bulk_with_two_payloads_is_a_conflict(
    rolled_back: psycopg.Connection,
) -> None:
    with pytest.raises(psycopg.errors.UniqueViolation, match="another payload"):
        enqueue(rolled_back, [Item(dedupe_key="k"), Item(dedupe_key="k", payload="2")])


@pytest.mark.parametrize("key", ["coalesce_key", "ordering_key"])
def test_messages_of_one_key_keep_the_order_of_the_items_with_any_dedupe_keys(
    rolled_back: psycopg.Connection, key: str
) -> None:
    """Several alternating keys, and enough of them that an unstable sort would mix equal ones."""
    items = [
        Item(dedupe_key=f"{(90 - number) * 7 % 101:03}")._replace(**{key: "cab"[number % 3]}) for number in range(90)
    ]
    answers = sorted(enqueue(rolled_back, items))
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
    answers = Outbox().enqueue_many(connection, messages)
    return [(index, answer.id, answer.duplicate) for index, answer in enumerate(answers)]


TOPICS: Final = st.sampled_from("cab")
KEYS: Final = st.sampled_from("yx")
ORDERED_ITEMS: Final = st.tuples(TOPICS, st.sampled_from((None, "default", "bulk")), KEYS).map(
    lambda drawn: Item(drawn[0], drawn[1], ordering_key=drawn[2])
)
COALESCED_ITEMS: Final = st.tuples(TOPICS, KEYS).map(lambda drawn: Item(drawn[0], coalesce_key=drawn[1]))


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
        pytest.param(Item("b", coalesce_key="k"), Item("a", dedupe_key="k"), id="coalesce keys, then dedupe keys"),
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


@pytest.mark.parametrize("queues", [None, [], [None, "bulk"]])
def test_a_bulk_notifies_for_the_default_queue_too(connect: Connect, queues: list[str | None] | None) -> None:
    listener, bulk = connect(autocommit=True), connect()
    listener.execute("LISTEN pgoutbox")
    for queue in ("default", "bulk"):
        listener.execute("SELECT pg_advisory_lock(1885826146, hashtext(%s))", [queue])
    bulk.execute(
        "SELECT FROM pgoutbox.enqueue_many(array_fill('t'::text, '{3}'), array_fill('1'::jsonb, '{3}'), %s::text[])",
        [queues],
    )
    bulk.execute("NOTIFY pgoutbox, 'the end'")
    bulk.commit()
    rung = set()
    for ring in listener.notifies():
        if ring.payload == "the end":
            break
        rung.add(ring.payload)
    assert rung == ({"default", "bulk"} if queues else {"default"})
