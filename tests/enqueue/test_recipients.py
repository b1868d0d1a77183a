"""Tests fan-outs whose destinations have payloads, headers, times and owners of their own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from pydantic import BaseModel

from pgoutbox import ArgumentError, Outbox, Recipient, Topic
from tests.support.outbox_actions import settings_for

if TYPE_CHECKING:
    from tests.conftest import AsyncConnect

KEY = "b2xkLWtleS1vZi10aGlydHktdHdvLWJ5dGVzLi4uLi4="
MOMENT = datetime(2030, 1, 1, tzinfo=UTC)
ROWS = """
    SELECT m.destination, m.payload, m.headers, m.available_at, m.owner, m.content_id IS NOT NULL
    FROM pgoutbox.message AS m
    ORDER BY m.id
"""


class Guest(BaseModel):
    name: str


def now_of(connection: psycopg.Connection) -> datetime:
    row = connection.execute("SELECT now()").fetchone()
    assert row is not None
    moment = row[0]
    assert isinstance(moment, datetime)
    return moment


def test_each_recipient_has_its_own_values_or_the_common_ones(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    recipients: list[str | Recipient] = [
        "mailto:a@example.org",
        Recipient("mailto:b@example.org", payload={"name": "Bob"}),
        Recipient("mailto:c@example.org", headers={"x": "3"}, available_at=MOMENT),
        Recipient("mailto:d@example.org", delay=timedelta(hours=1), owner="guest-4"),
    ]
    answers = outbox.on(rolled_back).enqueue_fanout(
        "mail", {"name": None}, recipients, content={"text": "hi"}, headers={"x": "0"}, owner="host"
    )
    now, common = now_of(rolled_back), {"name": None}
    assert answers.ids == sorted(answers.ids)
    assert rolled_back.execute(ROWS).fetchall() == [
        ("mailto:a@example.org", common, {"x": "0"}, now, "host", True),
        ("mailto:b@example.org", {"name": "Bob"}, {"x": "0"}, now, "host", True),
        ("mailto:c@example.org", common, {"x": "3"}, MOMENT, "host", True),
        ("mailto:d@example.org", common, {"x": "0"}, now + timedelta(hours=1), "guest-4", True),
    ]


async def test_an_async_connection_takes_recipients(outbox: Outbox, aconnect: AsyncConnect) -> None:
    connection = await aconnect()
    await outbox.on(connection).enqueue_fanout("mail", None, [Recipient("a:1", payload="x" * 2_000, delay=0), "a:2"])
    rows = await (await connection.execute(ROWS)).fetchall()
    assert [(row[0], row[1]) for row in rows] == [("a:1", "x" * 2_000), ("a:2", None)]


def test_a_delay_of_zero_replaces_the_common_one(outbox: Outbox, rolled_back: psycopg.Connection) -> None:
    outbox.on(rolled_back).enqueue_fanout("mail", None, [Recipient("a:1", delay=0), "a:2"], delay=60)
    now = now_of(rolled_back)
    assert [row[3] for row in rolled_back.execute(ROWS).fetchall()] == [now, now + timedelta(seconds=60)]


def test_the_model_and_the_owner_of_the_topic_apply_to_each_payload(
    outbox: Outbox, rolled_back: psycopg.Connection
) -> None:
    topic = Topic("mail", payload=Guest, owner=lambda p: f"guest-{p.name}")
    recipients = [Recipient("a:1", payload=Guest(name="ada")), Recipient("a:2")]
    outbox.on(rolled_back).enqueue_fanout(topic, Guest(name="all"), recipients)
    assert [(row[1], row[4]) for row in rolled_back.execute(ROWS).fetchall()] == [
        ({"name": "ada"}, "guest-ada"),
        ({"name": "all"}, "guest-all"),
    ]


def test_the_payloads_of_an_encrypted_topic_are_encrypted(dsn: str, rolled_back: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=KEY))
    topic = Topic("mail", encrypted=True)
    outbox.on(rolled_back).enqueue_fanout(topic, {"name": "all"}, [Recipient("a:1", payload={"name": "c4n4ry"})])
    assert "c4n4ry" not in str(rolled_back.execute(ROWS).fetchall())


@pytest.mark.parametrize(
    ("recipient", "field"),
    [
        (Recipient("ada"), r"destinations\[1\]\.destination: must be a URI"),
        (Recipient("a:1", payload=object()), r"destinations\[1\]\.payload"),
        (Recipient("a:1", headers={"": "x"}), r"destinations\[1\]\.headers"),
        (Recipient("a:1", owner=""), r"destinations\[1\]\.owner: must not be empty"),
        (Recipient("a:1", available_at=datetime(2030, 1, 1)), r"destinations\[1\]\.available_at"),  # noqa: DTZ001
        (Recipient("a:1", available_at=MOMENT, delay=1), r"destinations\[1\]\.delay: give delay or available_at"),
        (Recipient("a:1", delay=-1), r"destinations\[1\]\.delay"),
        (7, r"destinations\[1\]: must be text, not int"),
    ],
)
def test_an_invalid_value_is_named_with_its_destination(
    outbox: Outbox, rolled_back: psycopg.Connection, recipient: str | Recipient, field: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^{field}"):
        outbox.on(rolled_back).enqueue_fanout("mail", None, ["a:1", recipient])


def test_a_value_that_the_function_refuses_is_named_with_its_destination(
    outbox: Outbox, rolled_back: psycopg.Connection
) -> None:
    late = Recipient("a:1", available_at=MOMENT)
    with pytest.raises(ArgumentError, match=r"^destinations\[1\]\.expires_at: must be later"):
        outbox.on(rolled_back).enqueue_fanout("mail", None, ["a:1", late], expires_at=MOMENT)


@pytest.mark.parametrize(
    ("topic", "recipient", "field"),
    [
        (Topic("mail", delay=60), Recipient("a:1", delay=1), "delay"),
        (Topic("mail", delay=60), Recipient("a:1", available_at=MOMENT), "available_at"),
        (Topic("mail", owner=lambda _: "x"), Recipient("a:1", owner="y"), "owner"),
    ],
)
def test_an_option_of_the_topic_is_refused(
    outbox: Outbox, rolled_back: psycopg.Connection, topic: Topic[object], recipient: Recipient, field: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"destinations\[0\]\.{field}: belongs to the definition of topic 'mail'"):
        outbox.on(rolled_back).enqueue_fanout(topic, None, [recipient])
