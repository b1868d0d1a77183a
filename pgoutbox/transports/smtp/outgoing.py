"""What the SMTP transport and the sendmail transport share: the e-mail for the redirect that is on, and its senders."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message, Permanent
from pgoutbox.transports import pass_gate
from pgoutbox.transports.addresses import parse_mailbox
from pgoutbox.transports.smtp.mail import (
    NO_ENVELOPE_SENDER,
    NO_SENDER,
    Email,
    RawEmail,
    RenderedEmail,
    render,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.settings import Settings, SmtpSettings
    from pgoutbox.transports import Content
    from pgoutbox.transports.redirect import Redirect

SLOWEST_BYTES_PER_SECOND: Final = 100_000
"""The timeout of a large content grows: the receiver answers after the last byte."""


class OutgoingMail:
    """An e-mail as it is rendered for the redirect that is on."""

    def __init__(
        self, email: Email | RawEmail, message: Message[object], settings: Settings, own_redirect: Redirect | None
    ) -> None:
        self._email = email
        self._message = message
        self._settings = settings
        self._own_redirect = own_redirect
        self._rendered: tuple[Redirect | None, RenderedEmail] | None = None

    async def pass_gate(self) -> RenderedEmail:
        """Return the e-mail for the current redirect. Raises the refusals of the gate and of `render`."""
        # A redirect may be switched on while a long e-mail is rendered.
        while True:
            redirect = await pass_gate() or self._own_redirect
            if self._rendered is not None and self._rendered[0] == redirect:
                return self._rendered[1]
            inputs = (self._email, self._message, self._settings, redirect)
            # Encoding many megabytes takes so long that it would delay every other handler.
            is_long = isinstance(self._email, RawEmail) or bool(self._email.attachments)
            mail = await asyncio.to_thread(render, *inputs) if is_long else render(*inputs)
            self._rendered = redirect, mail


def sender_keys(breaker_key: str, content: Content, settings: SmtpSettings) -> Sequence[str]:
    """Return the keys of the senders of an e-mail: see `SmtpTransport.part_keys`."""
    if not isinstance(content, (Email, RawEmail)):
        return ()
    keys = []
    if content.envelope_sender is not None:
        domain = _address_in(content.envelope_sender).rpartition("@")[2]
        keys.append(f"{breaker_key} sender {f'@{domain}' if domain else '<>'}")
    if isinstance(content, Email) and content.sender not in (None, settings.sender):
        keys.append(f"{breaker_key} sender {_address_in(content.sender)}")
    elif isinstance(content, Email) or not keys:
        keys.append(f"{breaker_key} sender PGOUTBOX_SMTP_SENDER")
    return keys


def missing_sender(content: Email | RawEmail, settings: SmtpSettings) -> str | None:
    """Return the problem of an e-mail that needs the sender of the settings, if there is none."""
    if settings.sender is not None:
        return None
    if isinstance(content, Email):
        return NO_SENDER if content.sender is None else None
    return NO_ENVELOPE_SENDER if content.envelope_sender is None else None


def check_sender(settings: SmtpSettings) -> None:
    """Raise `ConfigurationError` for a sender of the settings that is not an address."""
    if settings.sender is not None:
        try:
            parse_mailbox("PGOUTBOX_SMTP_SENDER", settings.sender)
        except Permanent as refusal:
            raise ConfigurationError(refusal.error) from None


def _address_in(sender: object) -> str:
    """Return the address of `Ann Lee <ann@example.com>`. An invalid one is refused before it is sent."""
    return str(sender).rpartition("<")[2].rstrip("> ").lower()
