"""The message that announces the opening or closing of a circuit breaker, and its default handler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from pgoutbox.handlers import Context, Handler
from pgoutbox.message import Message
from pgoutbox.transports.smtp.mail import Email

ALERT_TOPIC: Final = "pgoutbox.alert"


async def render_alert(message: Message[object], _: Context) -> Email:
    """Return an e-mail to the message's destination."""
    alert = cast("Mapping[str, str]", message.payload)
    breaker = alert["breaker"]
    if alert["event"] == "closed":
        subject = f"Delivery works again: {breaker}"
        lines = [
            f"{breaker} was unavailable from {alert['opened_at']} to {alert['closed_at']}.",
            "The messages that were held back are sent now. No action is needed.",
            f"The last error was: {alert['error']}",
        ]
    else:
        subject = f"Circuit breaker open: {breaker}"
        lines = [
            f"{breaker} has been unavailable since {alert['opened_at']}.",
            f"The error is: {alert['error']}",
            "Its messages wait and use up no attempts. They are sent automatically when it works again.",
        ]
    return Email(subject=" ".join(subject.split()), text="\n\n".join(lines) + "\n")


def alert_handler() -> Handler:
    """Return the default handler of `pgoutbox.alert`, for applications without one."""
    return Handler(ALERT_TOPIC, render_alert)
