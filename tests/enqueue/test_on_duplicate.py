"""Tests the answer of an enqueue whose dedupe key another message has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import ArgumentError, DedupeConflictError, Enqueued, NewMessage, Outbox, State, Topic
from tests.support.messages import put
from tests.support.outbox_actions import enqueue

if TYPE_CHECKING:
    from tests.conftest import AsyncConnect


def test_another_payload_is_an_error_by_default(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    first = outbox.on(rolled_back).enqueue("mail", {"a": 1}, dedupe_key="k")
    for options in ({}, {"on_duplicate": "error"}):
        with pytest.raises(DedupeConflictError), rolled_back.transaction():
            outbox.on(rolled_back).enqueue("mail", {"a": 2}, dedupe_key="k", **options)  # type: ignore[call-overload]
    again = outbox.on(rolled_back).enqueue("mail", {"a": 1}, dedupe_key="k", on_duplicate="error")
    assert again == Enqueued(first.id, True, State.PENDING)


def test_another_payload_is_ignored_if_asked(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    first = outbox.on(rolled_back).enqueue("mail", {"a": 1}, dedupe_key="k")
    again = outbox.on(rolled_back).enqueue("mail", {"a": 2}, dedupe_key="k", on_duplicate="ignore")
    assert again == Enqueued(first.id, True, State.PENDING)
    bulk = [NewMessage("mail", {"a": n}, dedupe_key=key, on_duplicate="ignore") for n, key in ((3, "k"), (4, "l"))]
    answers = outbox.on(rolled_back).enqueue_many(bulk)
    assert answers[0] == again
    assert not answers[1].duplicate


def test_a_topic_decides_about_duplicates(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    topic = Topic("mail", on_duplicate="ignore", dedupe_key=lambda _: "k")
    first = outbox.on(rolled_back).enqueue(topic, {"a": 1})
    assert outbox.on(rolled_back).enqueue(topic, {"a": 2}) == Enqueued(first.id, True, State.PENDING)


def test_the_function_ignores_another_payload_if_asked(rolled_back: psycopg.Connection) -> None:
    first = enqueue(rolled_back, payload=1, dedupe_key="k")
    assert enqueue(rolled_back, payload=2, dedupe_key="k", on_duplicate="ignore") == first
    with pytest.raises(psycopg.errors.UniqueViolation), rolled_back.transaction():
        enqueue(rolled_back, payload=2, dedupe_key="k", on_duplicate="error")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"on_duplicate": "skip", "dedupe_key": "k"}, "must be error or ignore"),
        ({"on_duplicate": "ignore"}, "dedupe_key"),
    ],
)
def test_an_invalid_rule_is_refused(
    outbox: Outbox, rolled_back: psycopg.Connection, options: dict[str, str], problem: str
) -> None:
    with pytest.raises(ArgumentError, match=f"on_duplicate: .*{problem}"):
        outbox.on(rolled_back).enqueue("mail", None, **options)  # type: ignore[call-overload]
    with pytest.raises(psycopg.DataError, match=rf"pgoutbox\.enqueue: on_duplicate: .*{problem}"):
        enqueue(rolled_back, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [State.PENDING, State.SENDING, State.SENT, State.FAILED])
def test_a_duplicate_tells_the_state_of_the_message_that_it_found(
    outbox: Outbox, rolled_back: psycopg.Connection, state: State
) -> None:
    found = put(rolled_back, state, dedupe_key="k")
    payload = {"to": "ada"}
    assert outbox.on(rolled_back).enqueue("mail", payload, dedupe_key="k") == Enqueued(found, True, state)
    (other, again) = outbox.on(rolled_back).enqueue_many(
        [NewMessage("mail", payload, dedupe_key=key) for key in ("another", "k")]
    )
    assert other == Enqueued(other.id, False, State.PENDING)
    assert again == Enqueued(found, True, state)


def test_the_state_of_a_message_that_was_deleted_as_it_was_sent_is_unknown(
    outbox: Outbox, rolled_back: psycopg.Connection
) -> None:
    found = put(rolled_back, State.SENT, dedupe_key="k")
    rolled_back.execute("DELETE FROM pgoutbox.message WHERE id = %s", [found])
    rolled_back.execute("UPDATE pgoutbox.dedupe SET is_kept = true")
    item = NewMessage("mail", {"to": "ada"}, dedupe_key="k")
    assert outbox.on(rolled_back).enqueue("mail", {"to": "ada"}, dedupe_key="k") == Enqueued(found, True, None)
    assert outbox.on(rolled_back).enqueue_many([item]) == [Enqueued(found, True, None)]


async def test_async_drivers_answer_alike(outbox: Outbox, aconnect: AsyncConnect) -> None:
    connection = await aconnect()
    first = await outbox.on(connection).enqueue("mail", 1, dedupe_key="k")
    again = await outbox.on(connection).enqueue("mail", 2, dedupe_key="k", on_duplicate="ignore")
    assert again == Enqueued(first.id, True, State.PENDING)
