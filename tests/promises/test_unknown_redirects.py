"""Nothing is sent while it is unknown whether a redirect is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgoutbox import Context, Message, Outbox, Outcome, Sent, Worker
from tests.support.outbox_actions import attempts_of, enqueue, make_due, row_of, running, settings_for, state_of
from tests.support.waiting import until

if TYPE_CHECKING:
    import psycopg

    from pgoutbox.transports import Content
    from tests.conftest import Connect


class Postcard:
    """A content."""

    scheme = "postcard"


class Post:
    """A transport that records what it sends."""

    schemes = ("postcard",)

    def __init__(self) -> None:
        self.sent: list[int] = []

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Send a content."""
        self.sent.append(message.id)
        return Sent()

    async def aclose(self) -> None:
        """Do nothing: it keeps nothing open."""


async def test_a_message_waits_without_an_attempt_while_redirects_cannot_be_read(
    dsn: str, db: psycopg.Connection, connect: Connect
) -> None:
    post, session = Post(), connect()
    outbox = Outbox(settings_for(dsn, lock_timeout_seconds=0.1), transports=[post])

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Postcard:
        return Postcard()

    message_id = enqueue(db)
    session.execute("LOCK TABLE pgoutbox.redirect")
    async with running(Worker(outbox)):
        await until(lambda: attempts_of(db, message_id))
        assert post.sent == []
        session.rollback()
        make_due(db, message_id)
        enqueue(db)  # It wakes the worker.
        await until(lambda: state_of(db, message_id) == "sent")
    assert post.sent.count(message_id) == 1
    row = row_of(db, message_id)  # Of its eleven attempts it has used one.
    assert row.max_attempts - row.attempt_count == 10
