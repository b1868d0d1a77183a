"""The common part of the transports of e-mail: the e-mail for the redirect that is on, and its senders."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message, Outcome, Permanent, Snooze, Unavailable
from pgoutbox.transports import pass_gate
from pgoutbox.transports.addresses import parse_mailbox
from pgoutbox.transports.redirect import Redirect, RedirectRules, covering
from pgoutbox.transports.smtp.mail import Email, RawEmail, RenderedEmail, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.settings import Settings
    from pgoutbox.transports import Content

SLOWEST_BYTES_PER_SECOND: Final = 100_000
"""The timeout of a large content grows: the receiver answers after the last byte."""


class OutgoingMail:
    """An e-mail as it is rendered for the redirect that is on."""

    def __init__(
        self, email: Email | RawEmail, message: Message[object], settings: Settings, own_redirect: Redirect | None
    ) -> None:
        self.email = email
        self.message = message
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
            inputs = (self.email, self.message, self._settings, redirect)
            # Encoding many megabytes takes so long that it would delay every other handler.
            is_long = isinstance(self.email, RawEmail) or bool(self.email.attachments)
            mail = await asyncio.to_thread(render, *inputs) if is_long else render(*inputs)
            self._rendered = redirect, mail


class MailTransport(ABC):
    """A transport of `Email` and `RawEmail`. At most `smtp.connections` hand-overs run at once.

    `_name` is its name in errors, `_breaker_key` the key of the server or program for all recipients.
    """

    schemes: tuple[str, ...] = ("mailto",)
    follows_redirect: bool = True
    _name: str
    _breaker_key: str

    def __init__(self, settings: Settings) -> None:
        if settings.smtp.sender is not None:
            try:
                parse_mailbox("PGOUTBOX_SMTP_SENDER", settings.smtp.sender)
            except Permanent as refusal:
                raise ConfigurationError(refusal.error) from None
        self._own_redirects = RedirectRules.of(settings.redirect).redirects()
        self._settings = settings
        self._smtp = settings.smtp
        self._slots = asyncio.Semaphore(settings.smtp.connections)

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Hand the e-mail over, for all of its recipients or for none.

        `Permanent` names the wrong field or the refusal. Without a sender it is `Unavailable`, until the setting
        `smtp.sender` adds it. While a redirect is on, its receivers get the e-mail.
        """
        if not isinstance(content, (Email, RawEmail)):
            return Permanent(f"content: the {self._name} transport sends an Email, not {type(content).__name__}")
        mail = OutgoingMail(content, message, self._settings, covering(self._own_redirects, message.topic))
        try:
            await mail.pass_gate()
            async with self._slots:
                return await self._hand_over(mail)
        except Unavailable as missing:
            return Unavailable(missing.error, breaker=self.part_keys(message, content)[-1])
        except (Permanent, Snooze) as refusal:
            return refusal

    def breaker_key(self, message: Message[object], content: Content | None) -> str:  # noqa: ARG002 - one for all
        """Return the key of the server or program, for all recipients."""
        return self._breaker_key

    def part_keys(self, message: Message[object], content: Content) -> Sequence[str]:  # noqa: ARG002 - the content has it
        """Return the keys of the senders: that of the envelope, if it is another one, and of the e-mail.

        The sender of an e-mail is the one of the settings, or its own. The envelope senders of one domain share a key,
        because VERP gives each e-mail a different one.
        """
        if not isinstance(content, (Email, RawEmail)):
            return ()
        keys = []
        if content.envelope_sender is not None:
            domain = _address_in(content.envelope_sender).rpartition("@")[2]
            keys.append(f"{self._breaker_key} sender {f'@{domain}' if domain else '<>'}")
        if isinstance(content, Email) and content.sender not in (None, self._smtp.sender):
            keys.append(f"{self._breaker_key} sender {_address_in(content.sender)}")
        elif isinstance(content, Email) or not keys:
            keys.append(self._own_sender_key)
        return keys

    @property
    def _own_sender_key(self) -> str:
        return f"{self._breaker_key} sender PGOUTBOX_SMTP_SENDER"

    @abstractmethod
    async def _hand_over(self, mail: OutgoingMail) -> Outcome:
        """Hand the e-mail over once, after `mail.pass_gate`, whose refusals it raises."""


def _address_in(sender: object) -> str:
    """Return the address of `Ann Lee <ann@example.com>`. An invalid one is refused before it is sent."""
    return str(sender).rpartition("<")[2].rstrip("> ").lower()
