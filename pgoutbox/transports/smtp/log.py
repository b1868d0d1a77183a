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

from pgoutbox.message import Message, Outcome, Permanent, Sent, Snooze, Unavailable
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.redaction import redact_text
from pgoutbox.transports import pass_gate
from pgoutbox.transports.redirect import RedirectRules, covering
from pgoutbox.transports.smtp.mail import Email, RawEmail, RenderedEmail, render

if TYPE_CHECKING:
    from pgoutbox.settings import Settings
    from pgoutbox.transports import Content
    from pgoutbox.transports.redirect import Redirect

_telemetry: Final = Telemetry(logging.getLogger("pgoutbox.transports.smtp"))

_DEFAULT_SENDER: Final = "pgoutbox@localhost"
_MAX_LOGGED_CHARS: Final = 10_000


class LogTransport:
    """Writes e-mails to the log instead of sending them; the setting `mail.transport` selects it.

    The messages end `sent`. An invalid e-mail is refused as by `SmtpTransport`. With the setting `mail.directory` each
    attempt also writes the complete e-mail to a file there, named by its idempotency key and attempt.
    """

    schemes: tuple[str, ...] = ("mailto",)
    follows_redirect: bool = True

    def __init__(self, settings: Settings) -> None:
        self._own_redirects = RedirectRules.of(settings.redirect).redirects()
        if settings.smtp.sender is None:
            smtp = settings.smtp.model_copy(update={"sender": _DEFAULT_SENDER})
            settings = settings.model_copy(update={"smtp": smtp})
        self._settings = settings
        self._directory = None if settings.mail.directory is None else Path(settings.mail.directory)

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Write the e-mail, and return `Sent`. A directory that cannot be written is `Unavailable`.

        While a redirect is on, the e-mail has its recipients.
        """
        if not isinstance(content, (Email, RawEmail)):
            return Permanent(f"content: the log transport takes an Email, not {type(content).__name__}")
        try:
            redirect = await pass_gate() or covering(self._own_redirects, message.topic)
            await asyncio.to_thread(self._write, message, content, redirect)
        except (Permanent, Unavailable, Snooze) as refusal:
            return refusal
        except OSError as error:
            return Unavailable(f"PGOUTBOX_MAIL_DIRECTORY: {error}")
        return Sent()

    def _write(self, message: Message[object], content: Email | RawEmail, redirect: Redirect | None) -> None:
        mail = render(content, message, self._settings, redirect)
        file = None if self._directory is None else self._write_file(self._directory, message, mail)
        if isinstance(content, Email):
            head = BytesHeaderParser(policy=default).parsebytes(mail.content)
            shown = {name: str(value) for name, value in head.items()}
            text = content.text if content.text is not None else content.html or ""
            attachments = [attachment.filename for attachment in content.attachments]
        else:
            shown, text, attachments = {}, mail.content[:_MAX_LOGGED_CHARS].decode(errors="replace"), []
        names = self._settings.redacted_names
        _telemetry.report(
            logging.INFO,
            LogEvent.EMAIL_LOGGED,
            "e-mail not sent, only logged",
            message_id=message.id,
            topic=message.topic,
            sender=mail.sender,
            recipients=list(mail.recipients),
            headers={name: redact_text(value, names) for name, value in shown.items()},
            attachments=attachments,
            file=None if file is None else str(file),
            text=redact_text(text[:_MAX_LOGGED_CHARS], names),
        )

    def _write_file(self, directory: Path, message: Message[object], mail: RenderedEmail) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{message.idempotency_key}-{message.attempt_count}.eml"
        # E-mails contain links to sign in: only this user may read them.
        path.touch(mode=0o600)
        path.write_bytes(mail.content)
        return path

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""
