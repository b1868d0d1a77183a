"""The message that announces the opening or closing of a circuit breaker, and its default handler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from pgoutbox.handlers import Context, Handler
from pgoutbox.message import Message
from pgoutbox.transports.smtp.mail import Email

if TYPE_CHECKING:
    from pgoutbox.outbox import Outbox
    from pgoutbox.settings import Settings

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


def handlers_of(outbox: Outbox, settings: Settings) -> dict[str, Handler]:
    """Return the handlers of a worker: those of the application, and the default one of alerts if it sends alerts."""
    default = {} if settings.alert_destination is None else {ALERT_TOPIC: Handler(ALERT_TOPIC, render_alert)}
    return {**default, **outbox.handlers}
