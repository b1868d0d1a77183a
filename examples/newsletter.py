"""A newsletter: one content, many recipients, and a rate limit for the mail server.

    python -m examples.newsletter 100
    pgoutbox worker --app examples.newsletter:outbox --queue bulk

The text is stored once. Each recipient has a separate message with its own state and retries. The rate limit of the
queue `bulk` applies to all workers together. So bulk mail does not overload the mail server or delay other queues.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime

import psycopg
from pydantic import BaseModel

from pgoutbox import Context, Email, Message, Outbox, Topic
from pgoutbox.operations import Operator, Rate


class Issue(BaseModel):
    """An issue of the newsletter."""

    number: int


NEWSLETTER: Topic[Issue] = Topic("mail.newsletter", payload=Issue, queue="bulk")

outbox = Outbox()


@outbox.handler(NEWSLETTER)
async def newsletter(message: Message[Issue], ctx: Context) -> Email:  # noqa: ARG001
    """Render the shared text. The message's destination is the recipient."""
    text = message.content
    assert isinstance(text, str)
    return Email(subject=f"Issue {message.payload.number}", text=text)


def publish(connection: psycopg.Connection, number: int, text: str, addresses: list[str]) -> int:
    """Enqueue the issue for all addresses, in the caller's transaction. Return the number of messages."""
    destinations = [f"mailto:{address}" for address in addresses]
    return len(outbox.on(connection).enqueue_fanout(NEWSLETTER, Issue(number=number), destinations, content=text))


def main(recipients: int) -> None:
    """Set the rate limit of the queue, and publish an issue."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        Operator(connection).limit_rate("bulk", Rate(20, 1))
        today = datetime.now(UTC).date().isoformat()
        count = publish(connection, 12, f"News of {today}", [f"reader{n}@example.org" for n in range(recipients)])
        print("messages", count)
        print("contents", *(connection.execute("SELECT count(*) FROM pgoutbox.content").fetchone() or ()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
