"""Tests which transactions wait for each other's keys, and that one order of the keys prevents deadlocks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
import pytest
from psycopg.types.json import Jsonb

from pgoutbox import NewMessage, Outbox
from pgoutbox.message import State
from tests.support import races
from tests.support.drafts import enqueue_many
from tests.support.messages import put

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.conftest import Connect

    Message: TypeAlias = Mapping[str, Any]

pytestmark = pytest.mark.slow


def enqueue_coalesced(connection: psycopg.Connection, key: str) -> None:
    Outbox().on(connection).enqueue("greet", None, coalesce_key=key)


def enqueue_deduped(connection: psycopg.Connection, key: str) -> None:
    Outbox().on(connection).enqueue("greet", None, dedupe_key=key)


def in_different_order(connect: Connect, enqueue: Callable[[psycopg.Connection, str], None]) -> None:
    """Enqueue for two keys in two transactions, each in its own order, and raise the error that ends one of them."""
    first, second, observer = connect(), connect(), connect(autocommit=True)
    for connection in (first, second):
        connection.execute("SET LOCAL lock_timeout = 0; SET LOCAL deadlock_timeout = '10ms'")
    enqueue(first, "a")
    enqueue(second, "b")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(enqueue, first, "b")
        races.until_blocked(observer, first, waiting)
        try:
            enqueue(second, "a")
            waiting.result()
        finally:
            second.rollback()


@pytest.mark.parametrize("enqueue", [enqueue_coalesced, enqueue_deduped])
def test_separate_calls_for_two_keys_in_different_order_deadlock(
    connect: Connect, enqueue: Callable[[psycopg.Connection, str], None]
) -> None:
    with pytest.raises(psycopg.errors.DeadlockDetected):
        in_different_order(connect, enqueue)


def test_separate_calls_in_one_order_wait_and_do_not_deadlock(connect: Connect) -> None:
    first, second, observer = connect(), connect(), connect(autocommit=True)
    enqueue_coalesced(first, "a")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(enqueue_coalesced, second, "a")
        races.until_blocked(observer, second, waiting)
        enqueue_coalesced(first, "b")
        first.commit()
        waiting.result()
    enqueue_coalesced(second, "b")
    second.commit()


# --- one call in each transaction -------------------------------------------------------------------------------------


def message(topic: str, **options: object) -> Message:
    return {"topic": topic, "payload": 1, **options}


def in_sql(connection: psycopg.Connection, messages: Sequence[Message]) -> None:
    enqueue_many(connection, *messages)


def in_python(connection: psycopg.Connection, messages: Sequence[Message]) -> None:
    Outbox().on(connection).enqueue_many([NewMessage(**options) for options in messages])


def one_in_sql(connection: psycopg.Connection, messages: Sequence[Message]) -> None:
    (options,) = messages
    names = ", ".join(f"{name} => d.{name}" for name in options)
    call = f"SELECT pgoutbox.enqueue({names}) FROM jsonb_populate_record(NULL::pgoutbox.draft, %s) AS d"
    connection.execute(call.encode(), [Jsonb(options)])


def one_in_python(connection: psycopg.Connection, messages: Sequence[Message]) -> None:
    (options,) = messages
    Outbox().on(connection).enqueue(**options)


COALESCED: Final = [message(topic, coalesce_key=key) for topic in "ab" for key in "xy"]
ORDERED: Final = [message(topic, ordering_key=key, queue=queue) for topic, key, queue in ("axq", "byq", "axr", "byr")]
DEDUPED: Final = [message(topic, dedupe_key=key) for topic in "ab" for key in "xy"]
BOTH: Final = message("b", dedupe_key="d", coalesce_key="c")
MIXED: Final = [
    message("b", coalesce_key="x"),
    message("a", ordering_key="x", queue="q"),
    message("a", dedupe_key="z"),
    BOTH,
    message("a", coalesce_key="y", dedupe_key="y"),
    message("a", ordering_key="y", dedupe_key="o"),
    message("b", coalesce_key="x"),
    message("a"),
]
KEYS: Final = ("coalesce_key", "ordering_key", "dedupe_key")


def gates_of(messages: Sequence[Message]) -> list[Message]:
    """Return for each key a message that has only this one."""
    rest = [{name: value for name, value in one.items() if name not in KEYS} for one in messages]
    gates = [{**rest[n], key: one[key]} for n, one in enumerate(messages) for key in KEYS if key in one]
    return [gate for n, gate in enumerate(gates) if gate not in gates[:n]]


def cross(connect: Connect, gate: Message, *calls: tuple[Callable[..., None], Sequence[Message]]) -> list[str]:
    """Run each call in its own transaction, where all wait until the gate's key is free. Return how they ended."""
    holder, observer = connect(), connect(autocommit=True)
    in_sql(holder, [gate])

    def commit(connection: psycopg.Connection, call: Callable[..., None], messages: Sequence[Message]) -> str:
        try:
            call(connection, messages)
        except psycopg.errors.DeadlockDetected:
            connection.rollback()
            return "deadlock"
        connection.commit()
        return "committed"

    with ThreadPoolExecutor(len(calls)) as threads:
        ends = []
        for call, messages in calls:
            connection = connect()
            connection.execute("SET LOCAL lock_timeout = 0; SET LOCAL deadlock_timeout = '10ms'")
            ends.append(threads.submit(commit, connection, call, messages))
            races.until_blocked(observer, connection, ends[-1])
        holder.rollback()
        return [end.result() for end in ends]


def redefine(db: psycopg.Connection, function: str, guard: str, instead: str) -> None:
    ((definition,),) = db.execute("SELECT pg_get_functiondef(%s::regproc)", [f"pgoutbox.{function}"]).fetchall()
    assert definition.count(guard) == 1
    db.execute(definition.replace(guard, instead).encode())


@pytest.mark.parametrize(
    ("messages", "first", "second"),
    [
        (COALESCED, in_sql, in_sql),
        (ORDERED, in_sql, in_sql),
        (DEDUPED, in_sql, in_sql),
        (MIXED, in_python, in_python),
        (MIXED, in_sql, in_python),
    ],
    ids=["coalesce", "ordering", "dedupe", "all by python", "all by both"],
)
def test_two_bulks_with_the_same_keys_in_opposite_order_commit(
    connect: Connect,
    db: psycopg.Connection,
    messages: list[Message],
    first: Callable[..., None],
    second: Callable[..., None],
) -> None:
    """Each key in turn is the gate at which both wait with what they have locked before."""
    for gate in gates_of(messages):
        assert cross(connect, gate, (first, messages), (second, messages[::-1])) == ["committed"] * 2
        db.execute("TRUNCATE pgoutbox.dedupe")  # So that the next two write all of their messages, too.


@pytest.mark.parametrize(
    ("bulk", "single", "key"),
    [
        (in_sql, one_in_sql, "coalesce_key"),
        (in_sql, one_in_python, "ordering_key"),
        (in_python, one_in_sql, "ordering_key"),
        (in_python, one_in_python, "coalesce_key"),
    ],
)
def test_a_bulk_and_a_message_with_two_of_its_keys_commit(
    connect: Connect, db: psycopg.Connection, bulk: Callable[..., None], single: Callable[..., None], key: str
) -> None:
    both = message("b", dedupe_key="d", **{key: "c"})
    parts = [message("b", **{key: "c"}), message("b", dedupe_key="d")]
    for messages in (parts, parts[::-1]):
        calls = [(bulk, messages), (single, [both])]
        for gate in parts:
            for order in (calls, calls[::-1]):
                assert cross(connect, gate, *order) == ["committed"] * 2
                db.execute("TRUNCATE pgoutbox.dedupe")


@pytest.mark.parametrize("messages", [DEDUPED, [*DEDUPED[1:], message("a", dedupe_key="new")]])
def test_two_bulks_that_take_over_freed_dedupe_keys_in_opposite_order_commit(
    connect: Connect, db: psycopg.Connection, messages: list[Message]
) -> None:
    for gate in gates_of(messages):
        db.execute("TRUNCATE pgoutbox.dedupe")
        for freed in DEDUPED:
            put(db, State.CANCELLED, topic=freed["topic"], dedupe_key=freed["dedupe_key"])
        assert cross(connect, gate, (in_sql, messages), (in_sql, messages[::-1])) == ["committed"] * 2


EARLY_KEYS: Final = """
    IF (drafts[1]).coalesce_key = 'x' THEN
        PERFORM pgoutbox._take_keys(drafts, ids, known_ids);
    END IF;
    IF has_dedupe_keys THEN
"""
# The first bulk gets its coalesce key and waits at the gate. The second gets its dedupe key and waits for the first.
KEYS_FIRST: Final = [message("a", coalesce_key="x"), message("a", dedupe_key="gate"), message("a", dedupe_key="x")]
DEDUPE_KEYS_FIRST: Final = [message("a", dedupe_key="x"), message("a", coalesce_key="x")]


@pytest.mark.parametrize(
    ("first", "second", "function", "guard", "instead"),
    [
        (COALESCED, COALESCED[::-1], "_take_keys", "ORDER BY i.scope, i.key", "ORDER BY min(i.id)"),
        (ORDERED, ORDERED[::-1], "_take_keys", "ORDER BY i.scope, i.key", "ORDER BY min(i.id)"),
        (
            DEDUPED,
            DEDUPED[::-1],
            "_take_dedupe_keys",
            "FROM first AS f",
            "FROM (SELECT * FROM first ORDER BY id OFFSET 0) AS f",
        ),
        (KEYS_FIRST, DEDUPE_KEYS_FIRST, "_enqueue", "IF has_dedupe_keys THEN", EARLY_KEYS),
    ],
    ids=["coalesce", "ordering", "dedupe", "kinds"],
)
def test_without_one_order_two_bulks_deadlock(
    connect: Connect,
    db: psycopg.Connection,
    first: list[Message],
    second: list[Message],
    function: str,
    guard: str,
    instead: str,
) -> None:
    redefine(db, function, guard, instead)
    ends = cross(connect, gates_of(first)[1], (in_sql, first), (in_sql, second))
    assert sorted(ends) == ["committed", "deadlock"]


# --- keys of messages that are cancelled or deleted meanwhile ---------------------------------------------------------


def test_a_key_that_is_freed_while_a_bulk_waits_is_not_locked_out_of_order(connect: Connect) -> None:
    """The first bulk sees a duplicate of `b`, takes `c` and waits for `d`. The second takes `b`, and waits for `c`."""
    db, gate, first, second = connect(autocommit=True), connect(), connect(), connect()
    freed = put(db, topic="a", dedupe_key="b")
    in_sql(gate, [message("a", dedupe_key="d")])
    for connection in (first, second):
        connection.execute("SET LOCAL deadlock_timeout = '10ms'")

    def commit(connection: psycopg.Connection, keys: str) -> None:
        in_sql(connection, [message("a", dedupe_key=key, on_duplicate="ignore") for key in keys])
        connection.commit()

    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(commit, first, "bcd")
        races.until_blocked(db, first, waiting)
        db.execute("SELECT pgoutbox.cancel(%s)", [freed])
        other = threads.submit(commit, second, "bc")
        races.until_blocked(db, second, other)
        gate.rollback()
        waiting.result()
        other.result()


@pytest.mark.parametrize("act", ["prune", "erase"])
def test_a_deletion_does_not_wait_for_an_enqueue_that_takes_over_a_key(connect: Connect, act: str) -> None:
    db, producer = connect(autocommit=True), connect()
    cancelled = put(db, State.CANCELLED, topic="a", dedupe_key="k", age=timedelta(days=2))
    if act == "erase":  # As after a partition was dropped.
        db.execute("DELETE FROM pgoutbox.message")
    in_sql(producer, [message("a", dedupe_key="k")])
    db.execute("SET lock_timeout = '50ms'")
    if act == "prune":
        db.execute("SELECT pgoutbox.prune('{cancelled}', '1 day', NULL, 10)")
    else:
        db.execute("SELECT pgoutbox._erase(ARRAY[%s::bigint])", [cancelled])
    producer.commit()
    ((message_id,),) = db.execute("SELECT id FROM pgoutbox.message WHERE state = 'pending'").fetchall()
    assert db.execute("SELECT message_id FROM pgoutbox.dedupe").fetchall() == [(message_id,)]


KEEP: Final = "UPDATE pgoutbox.dedupe SET is_kept = true"


def test_repetitions_of_a_kept_key_do_not_wait_for_each_other(connect: Connect) -> None:
    """The key of a message that was deleted as it was sent."""
    db, first, second = connect(autocommit=True), connect(), connect()
    in_sql(db, [message("a", dedupe_key="k")])
    db.execute(KEEP)
    db.execute("DELETE FROM pgoutbox.message")
    second.execute("SET LOCAL lock_timeout = '50ms'")
    for connection in (first, second):
        in_sql(connection, [message("a", dedupe_key="k")])
    assert second.execute("SELECT FROM pgoutbox.message").rowcount == 0


def test_a_key_that_is_kept_while_an_enqueue_waits_for_it_is_not_taken_over(connect: Connect) -> None:
    db, first, second = connect(autocommit=True), connect(), connect(autocommit=True)
    in_sql(first, [message("a", dedupe_key="k")])
    first.execute(KEEP)
    first.execute("DELETE FROM pgoutbox.message")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(in_sql, second, [message("a", dedupe_key="k")])
        races.until_blocked(db, second, waiting)
        first.commit()
        waiting.result()
    assert db.execute("SELECT FROM pgoutbox.message").rowcount == 0
