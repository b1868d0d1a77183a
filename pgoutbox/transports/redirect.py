"""The redirect for testing: all e-mail goes to one address or one domain, except for recipients on a list.

Pure. It never redirects a real user's e-mail unnoticed: during a blackout, a worker does not start with a redirect,
and a running worker hands nothing over. Contents that cannot be redirected are held back.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, tzinfo
from email.headerregistry import Address
from typing import TYPE_CHECKING, Self
from zoneinfo import ZoneInfo

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, Unavailable
from pgoutbox.transports.addresses import Mailbox, parse_mailbox

if TYPE_CHECKING:
    from pgoutbox.settings import RedirectSettings

_TO = "PGOUTBOX_REDIRECT_TO"
_EXEMPT = "PGOUTBOX_REDIRECT_EXEMPT"
_BLACKOUT = "PGOUTBOX_REDIRECT_BLACKOUT"
_MAX_LOCAL_BYTES = 64
_WINDOW = re.compile(r"(\d{4}-\d\d-\d\d)/(\d{4}-\d\d-\d\d)(?:\[([A-Za-z0-9_+/-]+)\])?")


@dataclass(frozen=True, slots=True)
class Window:
    """A blackout: days on which nothing may be redirected, the first and the last included."""

    first: date
    last: date
    zone: tzinfo
    text: str

    @classmethod
    def parse(cls, text: str) -> Window:
        """Read `2026-04-01/2026-09-30`, days in UTC, or `2026-04-01/2026-09-30[Europe/Berlin]`."""
        matched = _WINDOW.fullmatch(text)
        if matched is None:
            raise ConfigurationError(
                f"{_BLACKOUT}: {text!r}: give FIRST/LAST, two dates, for example 2026-04-01/2026-09-30 or "
                "2026-04-01/2026-09-30[Europe/Berlin]"
            )
        first, last, zone = matched.groups()
        try:
            window = cls(date.fromisoformat(first), date.fromisoformat(last), ZoneInfo(zone) if zone else UTC, text)
        except (ValueError, OSError) as error:
            raise ConfigurationError(f"{_BLACKOUT}: {text!r}: {error}") from None
        except KeyError:
            raise ConfigurationError(f"{_BLACKOUT}: {text!r}: no time zone {zone!r} on this machine") from None
        if window.last < window.first:
            raise ConfigurationError(f"{_BLACKOUT}: {text!r}: ends before it begins")
        return window

    def __contains__(self, moment: datetime) -> bool:
        return self.first <= moment.astimezone(self.zone).date() <= self.last


@dataclass(frozen=True, slots=True)
class Redirect:
    """The target of redirected e-mail, the exempt recipients, and the blackouts."""

    target: Address
    to_domain: bool
    exempt: frozenset[str]
    windows: tuple[Window, ...]

    @classmethod
    def of(cls, settings: RedirectSettings) -> Self | None:
        """Return the redirect of the settings, or None. Invalid settings raise `ConfigurationError` in both cases."""
        windows = tuple(Window.parse(text) for text in _items(settings.blackout))
        exempt = frozenset(_exemption(text) for text in _items(settings.exempt))
        if settings.to is None:
            return None
        to_domain = settings.to.startswith("@")
        # The longest name for a redirected address must fit before the domain.
        full = "x" * _MAX_LOCAL_BYTES + settings.to if to_domain else settings.to
        return cls(_address(_TO, full), to_domain, exempt, windows)

    @classmethod
    def at_start(cls, settings: RedirectSettings) -> Self | None:
        """Return the redirect like `of`, and also raise `ConfigurationError` during a blackout."""
        redirect = cls.of(settings)
        if redirect is not None and (window := redirect._window()) is not None:
            raise ConfigurationError(
                f"{_TO} is set, and {_BLACKOUT} forbids to redirect within {window.text}: unset {_TO}"
            )
        return redirect

    def require_allowed(self) -> None:
        """Raise `Unavailable` during a blackout: neither users nor testers get e-mail."""
        if (window := self._window()) is not None:
            raise Unavailable(f"refuses to redirect within {window.text} ({_BLACKOUT}): unset {_TO} and restart")

    def _window(self) -> Window | None:
        now = datetime.now(UTC)
        return next((window for window in self.windows if now in window), None)

    def is_exempt(self, box: Mailbox) -> bool:
        """Whether this recipient is exempt from the redirect."""
        address = box.address
        return not self.exempt.isdisjoint({address.addr_spec.lower(), f"@{address.domain.lower()}"})

    def apply(self, box: Mailbox) -> Mailbox:
        """Return the mailbox that gets the e-mail instead of this recipient, under the recipient's name."""
        if self.is_exempt(box):
            return box
        name = _name_with_domain(box.address) if self.to_domain else self.target.username
        return Mailbox(box.field, Address(box.address.display_name, name, self.target.domain))


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
