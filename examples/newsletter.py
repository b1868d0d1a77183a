"""A newsletter: one content, many recipients, and no more than the mail server takes.

    python -m examples.newsletter 100
    pgoutbox worker --app examples.newsletter:outbox --queue bulk

The text is stored once. Each recipient has a message of its own, with its state and its retries. The queue `bulk` is
limited for all workers together, so that bulk mail neither annoys the mail server nor delays that of other queues.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime

import psycopg
from pydantic import BaseModel

from pgoutbox import Context, Email, Message, Outbox, Topic, operations
from pgoutbox.operations import Rate


class Issue(BaseModel):
    """Which issue of the newsletter."""

    number: int


NEWSLETTER: Topic[Issue] = Topic("mail.newsletter", payload=Issue, queue="bulk")

outbox = Outbox()


@outbox.handler(NEWSLETTER)
async def newsletter(message: Message[Issue], ctx: Context) -> Email:  # noqa: ARG001
    """The same text for everybody; the destination is the recipient."""
    text = message.content
    assert isinstance(text, str)
    return Email(subject=f"Issue {message.payload.number}", text=text)


def publish(connection: psycopg.Connection, number: int, text: str, addresses: list[str]) -> int:
    """Owe the issue to everybody, in the caller's transaction; how many messages that makes."""
    destinations = [f"mailto:{address}" for address in addresses]
    return len(outbox.enqueue_fanout(connection, NEWSLETTER, Issue(number=number), destinations, content=text))


def main(recipients: int) -> None:
    """Limit the queue, and publish an issue."""
    with psycopg.connect(os.environ["PGOUTBOX_DSN"]) as connection:
        operations.limit_rate(connection, "bulk", Rate(20, 1), burst=20)
        today = datetime.now(UTC).date().isoformat()
        count = publish(connection, 12, f"News of {today}", [f"reader{n}@example.org" for n in range(recipients)])
        print("messages", count)
        print("contents", *(connection.execute("SELECT count(*) FROM pgoutbox.content").fetchone() or ()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
