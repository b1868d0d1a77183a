"""The messages that tell a person of a fault, and their default handler.

Topic `pgoutbox.alert`. A payload has an `event`: `opened` and `closed` with the key of a circuit breaker, `failed` with
the topic and cause of failed messages, `failed_on_day` with all causes of an earlier day.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pgoutbox.handlers import Context, Handler
from pgoutbox.message import Message
from pgoutbox.text import one_line
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.transports import Content, scheme_of
from pgoutbox.transports.apprise import Notification
from pgoutbox.transports.smtp.mail import Email
from pgoutbox.transports.webhook.request import Webhook

if TYPE_CHECKING:
    from pgoutbox.outbox import Outbox
    from pgoutbox.settings import Settings


def alert_text(alert: Mapping[str, Any]) -> tuple[str, str]:
    """Return the subject and the text of an alert, given its payload."""
    match alert["event"]:
        case "opened":
            subject = f"Circuit breaker open: {alert['breaker']}"
            lines = [
                f"{alert['breaker']} has been unavailable since {alert['opened_at']}.",
                f"The error is: {alert['error']}",
                "Its messages wait and use up no attempts. They are sent automatically when it works again.",
            ]
        case "closed":
            subject = f"Delivery works again: {alert['breaker']}"
            lines = [
                f"{alert['breaker']} was unavailable from {alert['opened_at']} to {alert['closed_at']}.",
                "The messages that were held back are sent now. No action is needed.",
                f"The last error was: {alert['error']}",
            ]
        case "failed":
            subject = f"Failed: {alert['topic']}: {alert['cause'] or 'no error recorded'}"
            lines = [
                f"{_messages(alert['messages'])} of {alert['topic']} failed and will not be tried again:",
                alert["cause"] or "no error recorded",
                f"See them by cause: pgoutbox failures --topic {alert['topic']}",
                f"See the newest one: pgoutbox show {alert['newest_id']}",
                f"When the cause is fixed, deliver them: pgoutbox redrive --group {alert['group']}",
                "More failures of this cause are told tomorrow, in one message with all causes of the day.",
            ]
        case _:
            subject = f"{_messages(alert['messages'])} failed on {alert['day']}"
            lines = [
                *(
                    f"{_messages(group['messages'])} of {group['topic']}: {group['cause'] or 'no error recorded'}"
                    for group in alert["causes"]
                ),
                "They are failed still. See them by cause: pgoutbox failures",
            ]
    return one_line(subject, length=200), "\n\n".join(lines) + "\n"


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"


def handlers_of(outbox: Outbox, settings: Settings) -> dict[str, Handler]:
    """Return the handlers of a worker: those of the application, and the default one of alerts if it sends alerts."""
    is_signed = settings.webhook.secrets is not None

    async def send_alert(message: Message[object], _: Context) -> Content:
        alert = cast("Mapping[str, Any]", message.payload)
        subject, text = alert_text(alert)
        match scheme_of(message.destination or ""):
            case "apprise":
                return Notification(subject, text, kind="success" if alert["event"] == "closed" else "failure")
            case "https" | "http":
                # Chats show the member `text`.
                return Webhook(body={"text": f"{subject}\n\n{text}", **alert}, signed=is_signed)
            case _:
                return Email(subject=subject, text=text)

    default = {ALERT_TOPIC: Handler(ALERT_TOPIC, send_alert)} if settings.alert_destinations else {}
    return {**default, **outbox.handlers}
