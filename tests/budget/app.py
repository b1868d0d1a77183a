"""The application of the measured workers: a handler for each kind of work, which does as little as it can."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from pgoutbox import Context, Email, Message, Outbox, Outcome, RetryPolicy, Sent, SyncContext, Topic, Webhook
from pgoutbox.transports import Content, pass_gate


class Postcard:
    """A content."""

    scheme = "postcard"


class Post:
    """A transport that hands a content over at once, behind the gate."""

    schemes = ("postcard",)

    async def send(self, message: Message[object], content: Content) -> Outcome:
        await pass_gate()
        return Sent()

    async def aclose(self) -> None: ...


outbox = Outbox(transports=[Post()])
CONCURRENCY = int(os.environ.get("PGOUTBOX_CONCURRENCY", "50"))
_all_sessions_open = asyncio.Barrier(CONCURRENCY)


@outbox.handler("budget.plain")
async def plain(message: Message, context: Context) -> None:
    """Deliver."""


@outbox.handler("budget.slow")
async def wait(message: Message, context: Context) -> None:
    """Deliver in 10 ms."""
    await asyncio.sleep(0.01)


@outbox.handler("budget.sync")
def plain_sync(message: Message, context: SyncContext) -> None:
    """Deliver, in a thread, whose own calls are not counted."""


@outbox.handler("budget.content")
async def write(message: Message, context: Context) -> Content:
    """Return a content for the transport."""
    return Postcard()


if port := os.environ.get("BUDGET_PORT"):  # A claim names all topics, so the other kinds do without these two.

    @outbox.handler("budget.webhook")
    async def call(message: Message, context: Context) -> Webhook:
        """Call the receiver of the meter, with a signature."""
        return Webhook(body={"n": message.id}, url=f"http://127.0.0.1:{port}/")

    @outbox.handler("budget.email")
    async def mail(message: Message, context: Context) -> Email:
        """Send a short text."""
        return Email(subject="Budget", text=f"Message {message.id}\n")

    @outbox.handler(Topic("budget.list", mailing_list="news"))
    async def mail_list(message: Message, context: Context) -> Email:
        """Send the same, with a link to unsubscribe."""
        return Email(subject="Budget", text=f"Message {message.id}\n")


@outbox.handler("budget.retry", retry=RetryPolicy.steps(0, jitter=0))
async def retry(message: Message, context: Context) -> None:
    """Fail in the first attempt."""
    if message.attempt_count == 1:
        raise ConnectionError("the first attempt fails")


@outbox.handler("budget.effect", transactional=True)
async def effect(message: Message, context: Context) -> None:
    """Write one row."""
    await context.connection.execute("INSERT INTO effect (number) VALUES (%s)", (message.id,))


@outbox.handler("budget.shared", transactional=True, max_size=20)
async def share(message: Message, context: Context) -> None:
    """Write one row, in a transaction with others."""
    await context.connection.execute("INSERT INTO effect (number) VALUES (%s)", (message.id,))


@outbox.batch_handler("budget.batch", transactional=True, max_size=20)
async def write_all(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
    """Write one row for each message, in one statement."""
    numbers = [message.id for message in messages]
    await contexts[0].connection.execute("INSERT INTO effect (number) SELECT unnest(%s::bigint[])", (numbers,))


@outbox.handler("budget.session", transactional=True)
async def hold_session(message: Message, context: Context) -> None:
    """Hold the session until there is one for each slot, so that each run opens as many. Then begin the work."""
    if await _all_sessions_open.wait() == 0:
        await context.connection.execute("SELECT pgoutbox.resume_topic(topic) FROM pgoutbox.topic_pause")
