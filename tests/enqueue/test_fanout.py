"""Tests the SQL function enqueue_fanout, as a trigger, psql or another language calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, LiteralString

import pytest
from psycopg import errors

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect

FAN_OUT: LiteralString = """
SELECT f.item_index, f.id
FROM pgoutbox.enqueue_fanout(
    'greet', '{}', %(destinations)s::text[], content => %(content)s::jsonb, notify => %(notify)s,
    available_at => now() - interval '1 day', max_attempts => 3
) AS f
"""
ROWS: LiteralString = """
SELECT m.id, m.destination, m.available_at = now(), m.max_attempts, m.attempt_budget, m.content_id
FROM pgoutbox.message_live AS m
ORDER BY m.id
"""


def fan_out(
    connection: psycopg.Connection,
    destinations: list[str | None] | None,
    *,
    content: str | None = '"shared"',
    notify: bool = True,
) -> list[tuple[int, int]]:
    parameters = {"destinations": destinations, "content": content, "notify": notify}
    return connection.execute(FAN_OUT, parameters).fetchall()


def contents(connection: psycopg.Connection) -> list[tuple[int, object]]:
    return connection.execute("SELECT c.id, c.body FROM pgoutbox.content AS c").fetchall()


def test_each_destination_has_a_message_and_all_have_one_content(rolled_back: psycopg.Connection) -> None:
    answer = fan_out(rolled_back, ["a:2", "a:1", "a:2"])
    ((content_id, body),) = contents(rolled_back)
    assert body == "shared"
    assert [index for index, _ in answer] == [0, 1, 2]
    # A past due time becomes now, and the budget is the requested one.
    assert rolled_back.execute(ROWS).fetchall() == [
        (message_id, destination, True, 3, 3, content_id)
        for (_, message_id), destination in zip(answer, ("a:2", "a:1", "a:2"), strict=True)
    ]


def test_without_a_content_no_content_row_is_stored(rolled_back: psycopg.Connection) -> None:
    fan_out(rolled_back, ["a:1"], content=None)
    assert contents(rolled_back) == []
    assert [row[-1] for row in rolled_back.execute(ROWS).fetchall()] == [None]


def test_without_destinations_nothing_is_stored(rolled_back: psycopg.Connection) -> None:
    assert fan_out(rolled_back, []) == []
    assert contents(rolled_back) == []


@pytest.mark.parametrize("destinations", [None, ["a:1", None]])
def test_a_null_destination_is_refused(rolled_back: psycopg.Connection, destinations: list[str | None] | None) -> None:
    with pytest.raises(errors.NullValueNotAllowed, match="destinations: must not be null, nor hold a null"):
        fan_out(rolled_back, destinations)


def test_the_first_invalid_destination_is_named(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"items\[1\]\.destination: must be a URI"):
        fan_out(rolled_back, ["a:1", "no URI", "none either"])


@pytest.mark.parametrize(
    ("destinations", "notify", "rings"),
    [(["a:1", "a:2"], True, ["default"]), (["a:1"], False, []), ([], True, [])],
)
def test_one_notification_wakes_an_idle_worker_unless_there_is_nothing_for_it(
    connect: Connect, destinations: list[str | None], *, notify: bool, rings: list[str]
) -> None:
    producer, sleeper = connect(autocommit=True), connect(autocommit=True)
    sleeper.execute("LISTEN pgoutbox")
    sleeper.execute("SELECT pg_advisory_lock(1885826146, hashtext('default'))")
    fan_out(producer, destinations, notify=notify)
    sleeper.execute("SELECT")  # Notifications arrive with its answer.
    assert [notification.payload for notification in sleeper.notifies(timeout=0)] == rings
