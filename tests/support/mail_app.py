"""An application whose only handler returns an e-mail."""

from __future__ import annotations

from pgoutbox import Context, Email, Message, Outbox

outbox = Outbox()


@outbox.handler("mail")
async def mail(message: Message, ctx: Context) -> Email:
    """Return a short e-mail."""
    return Email(subject="Hello", text="Hello")


@outbox.handler("mail.broken")
async def broken(message: Message, ctx: Context) -> Email:
    """Fail with a secret."""
    raise ValueError("password=c4n4ry for nobody")
