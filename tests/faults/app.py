"""The application whose workers the fault tests run as processes: its handlers write to the ledger."""

from __future__ import annotations

import os
from pathlib import Path

from pgoutbox import Context, Message, Outbox, RetryPolicy
from tests.faults.ledger import Ledger
from tests.faults.load import LEDGER_VARIABLE, TOPIC

outbox = Outbox()
_ledger = Ledger(Path(os.environ[LEDGER_VARIABLE]))


@outbox.handler(TOPIC, retry=RetryPolicy.steps(0, jitter=0))
async def deliver(message: Message, ctx: Context) -> None:
    """Hand the message over, which is to write it down."""
    _ledger.hand_over(message.payload, message.attempt_count)
