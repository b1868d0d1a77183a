"""The application that fault tests run as worker processes. Its handlers write to the ledger."""

from __future__ import annotations

from pgoutbox import Context, Message, Outbox, RetryPolicy
from tests.support.ledger import told_ledger
from tests.support.load import TOPIC

outbox = Outbox()


@outbox.handler(TOPIC, retry=RetryPolicy.steps(0, jitter=0))
async def deliver(message: Message, ctx: Context) -> None:
    """Deliver the message by writing it to the ledger."""
    told_ledger().hand_over(message.payload, message.attempt_count)
