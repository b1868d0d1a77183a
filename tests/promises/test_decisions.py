"""The destination, the scheme of a content and the errors of a handler decide how an attempt ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from pydantic import BaseModel

from pgoutbox import (
    Context,
    Message,
    Outbox,
    Outcome,
    Permanent,
    RetryPolicy,
    Sent,
    Skip,
    Snooze,
    Topic,
    Transient,
    Worker,
)
from tests.support.outbox_actions import enqueue, row_of, rows_of, settings_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from pgoutbox.transports import Content


class Card:
    """A content."""

    scheme = "post"


class Greeting(BaseModel):
    """A payload."""

    name: str


class Post:
    """A transport that records the destinations of its contents."""

    schemes = ("post",)

    def __init__(self) -> None:
        self.destinations: list[str | None] = []

    async def send(self, message: Message[object], content: Content) -> Outcome:
        self.destinations.append(message.destination)
        return Transient("busy") if message.destination == "post:busy" else Sent()

    async def aclose(self) -> None: ...


LATER: Final = RetryPolicy.steps(3600, jitter=0)
LACK: Final = "this worker has no transport for the scheme"
# The attempts left, because a message that cannot be sent here uses up none.
SENT, RETRIED, FAILED, POSTPONED = ("sent", 10), ("pending", 10), ("failed", 10), ("pending", 11)


@pytest.mark.parametrize(
    ("destination", "ended", "reason"),
    [
        (None, SENT, None),
        ("post:box-7", SENT, None),
        ("POST:box-7", SENT, None),
        ("post:busy", RETRIED, "busy"),
        ("fax:1", POSTPONED, f"{LACK} 'fax' (it has: https, post)"),
        ("mailto:a@b.test", POSTPONED, f"{LACK} 'mailto' (it has: https, post); set PGOUTBOX_SMTP_HOST or"),
        ("http://a.test", POSTPONED, f"{LACK} 'http' (it has: https, post); use https, or set"),
        ("https://a.test", FAILED, "content: the webhook transport sends a Webhook, not Card"),
    ],
)
async def test_the_destination_decides_before_the_content(
    dsn: str, db: psycopg.Connection, destination: str | None, ended: tuple[str, int], reason: str | None
) -> None:
    outbox = Outbox(settings_for(dsn), transports=[post := Post()])

    @outbox.handler("greet", retry=LATER)
    async def greet(message: Message, ctx: Context) -> Card:
        return Card()

    message_id = enqueue(db, destination=destination)
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.max_attempts - row.attempt_count) == ended
    assert (reason or "") in (row.last_error or "")
    reaches_post = destination is None or destination.lower().startswith("post:")
    assert post.destinations == ([destination] if reaches_post else [])


@pytest.mark.parametrize(
    ("raised", "ended"),
    [
        (ValueError("a"), RETRIED),
        (KeyError("a"), FAILED),
        (Transient("busy"), RETRIED),
        (Permanent("no"), FAILED),
        (Skip("not needed"), ("skipped", 10)),
        (Snooze(3600), POSTPONED),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_batch", [False, True], ids=["single", "batch"])
async def test_an_error_of_a_handler_decides(
    dsn: str, db: psycopg.Connection, is_batch: bool, raised: Exception, ended: tuple[str, int]
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", retry=LATER, permanent=[LookupError, Transient])
    async def greet(message: Message, ctx: Context) -> None:
        raise raised

    @outbox.batch_handler("greet.all", max_size=10, retry=LATER, permanent=[LookupError, Transient])
    async def greet_all(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        raise raised

    message_id = enqueue(db, "greet.all" if is_batch else "greet")
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.max_attempts - row.attempt_count) == ended


async def test_an_unreadable_message_of_a_batch_waits_alone(dsn: str, db: psycopg.Connection) -> None:
    outbox, handed_over = Outbox(settings_for(dsn)), list[str]()

    @outbox.batch_handler(Topic("greet", payload=Greeting), max_size=10)
    async def greet(messages: Sequence[Message[Greeting]], contexts: Sequence[Context]) -> None:
        handed_over.extend(message.payload.name for message in messages)

    with db.transaction():
        ids = [enqueue(db, payload=payload) for payload in ({"name": "Ann"}, {"title": "s3cret"}, {"name": "Bo"})]
    await Worker(outbox).run_once()
    assert handed_over == ["Ann", "Bo"]
    assert [row.state for row in rows_of(db, *ids)] == ["sent", "pending", "sent"]
    row = row_of(db, ids[1])
    assert row.max_attempts - row.attempt_count == 11
    assert "payload.name" in str(row.last_error)
    assert "s3cret" not in str(row.last_error)
