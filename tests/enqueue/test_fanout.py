"""Tests the SQL function enqueue_fanout, as a trigger, psql or another language calls it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

if TYPE_CHECKING:
    from tests.conftest import Connect

MESSAGE: dict[str, object] = {
    "topic": "greet",
    "payload": {},
    "max_attempts": 3,
    "available_at": (datetime.now(UTC) - timedelta(days=1)).isoformat(),
}
FAN_OUT: LiteralString = """
SELECT f.item_index, f.id
FROM pgoutbox.enqueue_fanout(
    %(message)s, %(destinations)s::jsonb, content => %(content)s::jsonb, notify => %(notify)s
) AS f
ORDER BY f.item_index
"""
ROWS: LiteralString = """
SELECT m.id, m.destination, m.available_at = now(), m.max_attempts, m.attempt_budget, m.content_id
FROM pgoutbox.message_live AS m
ORDER BY m.id
"""


def fan_out(
    connection: psycopg.Connection,
    destinations: object,
    *,
    message: object = MESSAGE,
    content: str | None = '"shared"',
    notify: bool = True,
) -> list[tuple[int, int]]:
    parameters = {
        "message": Jsonb(message),
        "destinations": None if destinations is None else Jsonb(destinations),
        "content": content,
        "notify": notify,
    }
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


@pytest.mark.parametrize("destinations", [None, {}, "a:1", 7, {"destination": "a:1"}])
def test_destinations_that_are_not_an_array_are_refused(rolled_back: psycopg.Connection, destinations: object) -> None:
    with pytest.raises(psycopg.DataError, match=r"^pgoutbox\.enqueue: destinations: must") as caught:
        fan_out(rolled_back, destinations)
    assert (caught.value.diag.schema_name, caught.value.diag.column_name) == ("pgoutbox", "destinations")


@pytest.mark.parametrize(
    "destination", [None, 7, True, [], ["a:1"], {}, {"destination": None}, {"destination": 7}, {"payload": 1}]
)
def test_a_null_or_missing_destination_is_refused(rolled_back: psycopg.Connection, destination: object) -> None:
    with pytest.raises(psycopg.DataError, match=r"destinations\[1\]\.destination: must") as caught:
        fan_out(rolled_back, ["a:1", destination])
    assert (caught.value.diag.schema_name, caught.value.diag.column_name) == ("pgoutbox", "destination")


def test_the_first_invalid_destination_is_named(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"destinations\[1\]\.destination: must be a URI"):
        fan_out(rolled_back, ["a:1", "no URI", "none either"])


@pytest.mark.parametrize("message", [None, [], "greet", 7, [MESSAGE]])
def test_a_message_that_is_not_an_object_is_refused(rolled_back: psycopg.Connection, message: object) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"^pgoutbox\.enqueue: message: must be a JSON object"):
        fan_out(rolled_back, [], message=message)


@pytest.mark.parametrize("key", ["coalesce_key", "ordering_key", "dedupe_key"])
def test_the_messages_of_a_fan_out_have_no_keys(rolled_back: psycopg.Connection, key: str) -> None:
    no_keys = r"message: .*no keys; use enqueue_many"
    with pytest.raises(errors.InvalidParameterValue, match=no_keys), rolled_back.transaction():
        fan_out(rolled_back, ["a:1"], message={**MESSAGE, key: "k"})
    with pytest.raises(errors.InvalidParameterValue, match=r"destinations\[1\].*no keys; use enqueue_many"):
        fan_out(rolled_back, ["a:1", {"destination": "a:2", key: "k"}])


def test_the_messages_of_a_fan_out_have_one_topic(rolled_back: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=r"destinations\[0\].*one topic"):
        fan_out(rolled_back, [{"destination": "a:2", "topic": "greet"}])


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"queu": "a"}, "options: unknown option queu"),
        ({"queue": 7}, "queue: must be"),
        ({"owner": ""}, "owner: must not be empty"),
    ],
)
def test_an_invalid_option_of_a_destination_is_named(
    rolled_back: psycopg.Connection, own: dict[str, object], problem: str
) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=rf"destinations\[1\]\.{problem}"):
        fan_out(rolled_back, ["a:1", {"destination": "a:2", **own}])


def test_values_of_a_destination_replace_those_of_the_message(rolled_back: psycopg.Connection) -> None:
    """An own time replaces the common one, of whichever kind, and an own payload of null is a payload."""
    message = {"topic": "greet", "payload": 1, "queue": "q", "owner": "o", "headers": {"a": "1"}, "delay": 60}
    own = {"payload": None, "queue": "r", "owner": "p", "headers": {"b": "2"}, "max_attempts": 5}
    fan_out(
        rolled_back,
        [
            "a:0",
            {"destination": "a:1"},
            {"destination": "a:2", **own},
            {"destination": "a:3", "available_at": "2000-01-01T00:00:00Z"},
            {"destination": "a:4", "delay": 0},
        ],
        message=message,
    )
    rows = rolled_back.execute(
        """
        SELECT
            m.destination, m.payload, m.queue, m.owner, m.headers, m.max_attempts,
            extract(epoch FROM m.available_at - m.created_at)::integer
        FROM pgoutbox.message AS m
        ORDER BY m.destination
        """
    )
    assert rows.fetchall() == [
        ("a:0", 1, "q", "o", {"a": "1"}, 11, 60),
        ("a:1", 1, "q", "o", {"a": "1"}, 11, 60),
        ("a:2", None, "r", "p", {"b": "2"}, 5, 60),
        ("a:3", 1, "q", "o", {"a": "1"}, 11, 0),
        ("a:4", 1, "q", "o", {"a": "1"}, 11, 0),
    ]


def test_a_fan_out_notifies_once_for_each_queue(connect: Connect) -> None:
    producer, sleeper = connect(autocommit=True), connect(autocommit=True)
    sleeper.execute("LISTEN pgoutbox")
    for queue in ("default", "bulk"):
        sleeper.execute("SELECT pg_advisory_lock(1885826146, hashtext(%s))", [queue])
    fan_out(producer, ["a:1", {"destination": "a:2", "queue": "bulk"}, "a:3"])
    sleeper.execute("SELECT")  # Notifications arrive with its answer.
    assert sorted(notification.payload for notification in sleeper.notifies(timeout=0)) == ["bulk", "default"]


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
