"""An application for workers that run as processes: its messages are lines for a host that may be dead."""

from __future__ import annotations

from pgoutbox import Context, Message, Outbox, RetryPolicy
from tests.support.line_server import Line, LineTransport

outbox = Outbox(transports=[LineTransport(timeout_seconds=60)])


@outbox.handler("greet", retry=RetryPolicy.steps(0.05, jitter=0))
async def greet(message: Message, ctx: Context) -> Line:
    """Say which message and which process it is."""
    return Line(f"{message.id}")
