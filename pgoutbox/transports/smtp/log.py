"""The transport for development: it writes e-mails to the log and to files, and sends nothing.

The log entry is redacted, the file is complete: links in it work.
"""

from __future__ import annotations

import asyncio
import logging
from email.parser import BytesHeaderParser
from email.policy import default
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pgoutbox.message import Outcome, Sent, Unavailable
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.redaction import redact_text
from pgoutbox.transports.smtp.mail import Email, RenderedEmail
from pgoutbox.transports.smtp.outgoing import MailTransport, OutgoingMail

if TYPE_CHECKING:
    from pgoutbox.settings import Settings

_telemetry: Final = Telemetry(logging.getLogger("pgoutbox.transports.smtp"))

_DEFAULT_SENDER: Final = "pgoutbox@localhost"
_MAX_LOGGED_CHARS: Final = 10_000


class LogTransport(MailTransport):
    """Writes e-mails to the log instead of sending them; the setting `mail.transport` selects it.

    The messages end `sent`. An invalid e-mail is refused as by `SmtpTransport`. With the setting `mail.directory` each
    attempt also writes the complete e-mail to a file there, named by its idempotency key and attempt. A directory that
    cannot be written is `Unavailable`.
    """

    _name = "log"
    _breaker_key = "mailto"

    def __init__(self, settings: Settings) -> None:
        if settings.smtp.sender is None:
            smtp = settings.smtp.model_copy(update={"sender": _DEFAULT_SENDER})
            settings = settings.model_copy(update={"smtp": smtp})
        super().__init__(settings)

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""

    async def _hand_over(self, mail: OutgoingMail) -> Outcome:
        try:
            await asyncio.to_thread(self._write, mail, await mail.pass_gate())
        except OSError as error:
            return Unavailable(f"PGOUTBOX_MAIL_DIRECTORY: {error}")
        return Sent()

    def _write(self, mail: OutgoingMail, rendered: RenderedEmail) -> None:
        message, email = mail.message, mail.email
        file = None
        if self._settings.mail.directory is not None:
            file = Path(self._settings.mail.directory, f"{message.idempotency_key}-{message.attempt_count}.eml")
            file.parent.mkdir(parents=True, exist_ok=True)
            # E-mails contain links to sign in: only this user may read them.
            file.touch(mode=0o600)
            file.write_bytes(rendered.content)
        if isinstance(email, Email):
            head = BytesHeaderParser(policy=default).parsebytes(rendered.content)
            shown = {name: str(value) for name, value in head.items()}
            text = email.text if email.text is not None else email.html or ""
            attachments = [attachment.filename for attachment in email.attachments]
        else:
            shown, text, attachments = {}, rendered.content[:_MAX_LOGGED_CHARS].decode(errors="replace"), []
        names = self._settings.redacted_names
        _telemetry.report(
            logging.INFO,
            LogEvent.EMAIL_LOGGED,
            "e-mail not sent, only logged",
            message_id=message.id,
            topic=message.topic,
            sender=rendered.sender,
            recipients=list(rendered.recipients),
            headers={name: redact_text(value, names) for name, value in shown.items()},
            attachments=attachments,
            file=None if file is None else str(file),
            text=redact_text(text[:_MAX_LOGGED_CHARS], names),
        )
