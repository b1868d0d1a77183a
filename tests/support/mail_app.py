"""An application whose only handler returns an e-mail."""

from __future__ import annotations

from pgoutbox import Context, Email, Message, Outbox

outbox = Outbox()


@outbox.handler("mail")
async def mail(message: Message, ctx: Context) -> Email:
    """Return a short e-mail."""
    return Email(subject="Hello", text="Hello")
