"""The message that announces a circuit breaker which opened or closed, and the handler that workers have for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from pgoutbox.handlers import Context, Handler
from pgoutbox.message import Message
from pgoutbox.retry import RetryPolicy
from pgoutbox.transports.smtp.mail import Email

ALERT_TOPIC: Final = "pgoutbox.alert"


async def render_alert(message: Message[object], _: Context) -> Email:
    """An e-mail to the message's destination."""
    alert = cast("Mapping[str, str]", message.payload)
    breaker = alert["breaker"]
    if alert["event"] == "closed":
        subject = f"Delivery works again: {breaker}"
        lines = [
            f"{breaker} was out of order from {alert['opened_at']} to {alert['closed_at']}.",
            "What was held back goes out now. Nothing has to be done.",
            f"The last error was: {alert['error']}",
        ]
    else:
        subject = f"Delivery is held back: {breaker}"
        lines = [
            f"{breaker} has been out of order since {alert['opened_at']}.",
            f"The error is: {alert['error']}",
            "Messages for it wait and use up no attempts. They go out by themselves once it is in order.",
        ]
    return Email(subject=" ".join(subject.split()), text="\n\n".join(lines) + "\n")


def alert_handler() -> Handler:
    """The handler of `pgoutbox.alert` for a worker whose application has none."""
    return Handler.of(
        ALERT_TOPIC,
        render_alert,
        retry=RetryPolicy(),
        timeout=None,
        on_unknown="retry",
        max_batch=None,
        transactional=False,
        permanent_errors=(),
        payload_model=None,
    )
