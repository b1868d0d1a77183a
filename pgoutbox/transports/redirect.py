"""The redirect for testing: all e-mail goes to one address or one domain, except for recipients on a list.

Pure. `RedirectRules` are a worker's settings. The target comes from them, or from the operator who switched a redirect
on. It never redirects a real user's e-mail unnoticed: during a blackout, e-mail waits. Contents that cannot be
redirected are held back.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from email.headerregistry import Address
from typing import TYPE_CHECKING, Self

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message, Permanent, Postponed, ReasonCode
from pgoutbox.transports.addresses import Mailbox, parse_mailbox

if TYPE_CHECKING:
    from pgoutbox.settings import RedirectSettings

REDIRECT_SECONDS = 2.0
"""How long a worker may rely on what it has read of an operator's redirect. So long a switch takes at most."""

_TO = "PGOUTBOX_REDIRECT_TO"
_EXEMPT = "PGOUTBOX_REDIRECT_EXEMPT"
_MAX_LOCAL_BYTES = 64
_MAX_PAUSE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class RedirectRules:
    """The settings of the redirect: its target if the environment has one, and exempt recipients."""

    to: str | None
    exempt: frozenset[str]

    @classmethod
    def of(cls, settings: RedirectSettings) -> Self:
        """Return the rules of the settings. Raises `ConfigurationError` for an invalid setting."""
        exempt = frozenset(_exemption(text) for text in _items(settings.exempt))
        rules = cls(settings.to, exempt)
        rules.redirect()
        return rules

    def redirect(self, switched_to: str | None = None, *, blackout: str | None = None) -> Redirect | None:
        """Return the redirect to the target that an operator has switched on, or else to that of the settings.

        `blackout` is the name of the one that forbids to redirect now. Raises `ConfigurationError` for a target that is
        not an address, or `@` and a domain.
        """
        if switched_to is not None:
            return Redirect(switched_to, _target("target", switched_to), self, blackout)
        return None if self.to is None else Redirect(self.to, _target(_TO, self.to), self, blackout)


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirect that is on: its target, an address or `@` and a domain, the rules of the worker, and the blackout."""

    target: str
    address: Address
    rules: RedirectRules
    blackout: str | None = None

    def refusal(self, message: Message[object]) -> Postponed | None:
        """Return the outcome of a content that a blackout forbids to redirect; None on other days.

        Neither its receiver nor the testers get it. It waits, and uses up no attempt.
        """
        if self.blackout is None:
            return None
        return held_back(message, f"refuses to redirect to {self.target} within the blackout {self.blackout}")

    def is_exempt(self, box: Mailbox) -> bool:
        """Whether this recipient is exempt from the redirect."""
        address = box.address
        return not self.rules.exempt.isdisjoint({address.addr_spec.lower(), f"@{address.domain.lower()}"})

    def apply(self, box: Mailbox) -> Mailbox:
        """Return the mailbox that gets the e-mail instead of this recipient, under the recipient's name."""
        if self.is_exempt(box):
            return box
        name = _name_with_domain(box.address) if self.target.startswith("@") else self.address.username
        return Mailbox(box.field, Address(box.address.display_name, name, self.address.domain))


def held_back(message: Message[object], reason: str) -> Postponed:
    """Return the outcome of a message that waits for the end of a redirect. The pauses grow to five minutes.

    `clear_redirect` ends the pause.
    """
    pause = min(_MAX_PAUSE_SECONDS, 2.0 ** min(message.attempt_count, 10))
    return Postponed(max(1.0, pause * random.uniform(0.5, 1)), reason, code=ReasonCode.REDIRECT)


def check_target(target: str) -> None:
    """Raise `ConfigurationError` for a target that is not an address, or `@` and a domain."""
    _target("target", target)


def _target(name: str, target: str) -> Address:
    # The longest name for a redirected address must fit before the domain.
    address = _address(name, "x" * _MAX_LOCAL_BYTES + target if target.startswith("@") else target)
    # The rule of pgoutbox.set_redirect: no display name, and ASCII alone.
    if not target.isascii() or re.search(r"[\s<]", target):
        raise ConfigurationError(f"{name}: {target!r} is not plain ASCII; give an address, or @ and a domain")
    return address


def _items(text: str | None) -> list[str]:
    return [] if text is None else [item.strip() for item in text.split(",")]


def _address(name: str, text: str) -> Address:
    try:
        return parse_mailbox(name, text).address
    except Permanent as refusal:
        raise ConfigurationError(f"{refusal.error}; give an address, or @ and a domain") from None


def _exemption(text: str) -> str:
    address = _address(_EXEMPT, f"x{text}" if text.startswith("@") else text)
    return (f"@{address.domain}" if text.startswith("@") else address.addr_spec).lower()


def _name_with_domain(address: Address) -> str:
    """Return a mailbox name that shows the recipient: `ann=example.com`. A long name is cut and gets a digest."""
    name = f"{address.username}={address.domain}"
    if len(name.encode()) <= _MAX_LOCAL_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name.encode()[: _MAX_LOCAL_BYTES - 13].decode(errors='ignore')}-{digest}"
