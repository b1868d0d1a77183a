"""The redirect for testing: e-mail goes to one address or one domain, except for recipients and topics on lists.

Pure. `RedirectRules` are a worker's settings. The target comes from them, or from the operator who switched a redirect
on. It never redirects a real user's e-mail unnoticed: during a blackout, e-mail waits. Contents that cannot be
redirected are held back.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from email.headerregistry import Address
from typing import TYPE_CHECKING, Final, Self

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Message, Permanent, Postponed, ReasonCode
from pgoutbox.text import NAME
from pgoutbox.transports.addresses import Mailbox, parse_mailbox

if TYPE_CHECKING:
    from pgoutbox.settings import RedirectSettings

REDIRECT_SECONDS = 2.0
"""How long a worker may rely on what it has read of an operator's redirect. So long a switch takes at most."""

_MAX_LOCAL_BYTES = 64
_MAX_PAUSE_SECONDS = 300.0
_MAX_TOPICS: Final = 50
_TOPICS: Final = re.compile(NAME.pattern + r"\*?")


@dataclass(frozen=True, slots=True)
class RedirectRules:
    """The settings of the redirect: its target if the environment has one, and exempt recipients and topics."""

    to: str | None
    exempt: frozenset[str]
    exempt_topics: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: RedirectSettings) -> Self:
        """Return the rules of the settings. Raises `ConfigurationError` for an invalid setting."""
        exempt = frozenset(_exemption(text) for text in _items(settings.exempt))
        exempt_topics = _items(settings.exempt_topics)
        _check_topics("PGOUTBOX_REDIRECT_EXEMPT_TOPICS", exempt_topics)
        rules = cls(settings.to, exempt, tuple(exempt_topics))
        rules.redirects()
        return rules

    def redirects(
        self,
        target: str | None = None,
        topics: Collection[str] | None = None,
        exempt_topics: Collection[str] | None = None,
        blackout: str | None = None,
    ) -> tuple[Redirect, ...]:
        """Return the redirects that are on: an operator's to `target`, and then that of the settings. See `covering`.

        `blackout` is the name of the one that forbids to redirect now. Raises `ConfigurationError` for a target that is
        not an address, or `@` and a domain, and for a topic that cannot be one.
        """
        found = []
        if target is not None:
            check_topics(topics or (), exempt_topics or ())
            address, exempt_here = parse_target("target", target), (*(exempt_topics or ()), *self.exempt_topics)
            found.append(Redirect(target, address, self.exempt, blackout, tuple(topics or ()), exempt_here))
        if self.to is not None:
            address = parse_target("PGOUTBOX_REDIRECT_TO", self.to)
            found.append(Redirect(self.to, address, self.exempt, blackout, (), self.exempt_topics))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirect that is on: its target, an address or `@` and a domain, the exempt recipients, and the blackout.

    With `topics` it covers only those. An entry is a topic, or the beginning of topics and `*`.
    """

    target: str
    address: Address
    exempt: frozenset[str]
    blackout: str | None = None
    topics: tuple[str, ...] = ()
    exempt_topics: tuple[str, ...] = ()

    @property
    def mail(self) -> str:
        """The redirected e-mail in words."""
        return redirected_mail(self.topics, self.exempt_topics)

    def covers(self, topic: str) -> bool:
        """Whether the messages of this topic are redirected."""
        return (not self.topics or _is_listed(topic, self.topics)) and not _is_listed(topic, self.exempt_topics)

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
        return not self.exempt.isdisjoint({address.addr_spec.lower(), f"@{address.domain.lower()}"})

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


def covering(redirects: Iterable[Redirect], topic: str) -> Redirect | None:
    """Return the first redirect that covers the topic, or None: its messages go to their real recipients."""
    return next((redirect for redirect in redirects if redirect.covers(topic)), None)


def redirected_mail(topics: Sequence[str] | None, exempt_topics: Sequence[str] | None) -> str:
    """Return in words which e-mail a redirect with these lists covers.

    >>> redirected_mail(["mail.user.*"], None), redirected_mail(None, ["mail.club.*"])
    ('e-mail of mail.user.*', 'all e-mail except that of mail.club.*')
    """
    mail = f"e-mail of {', '.join(topics)}" if topics else "all e-mail"
    return f"{mail} except that of {', '.join(exempt_topics)}" if exempt_topics else mail


def check_topics(topics: Collection[str], exempt_topics: Collection[str]) -> None:
    """Raise `ConfigurationError` for a list with an entry that is not a topic, or the beginning of one and `*`."""
    _check_topics("topics", topics)
    _check_topics("exempt_topics", exempt_topics)


def _check_topics(name: str, topics: Collection[str]) -> None:
    if isinstance(topics, str):
        raise ConfigurationError(f"{name}: must be a list of topics, not the text {topics!r}")
    if len(topics) > _MAX_TOPICS:
        raise ConfigurationError(
            f"{name}: {len(topics)} are more than {_MAX_TOPICS}; give the beginning of several and *"
        )
    for topic in topics:
        if not _TOPICS.fullmatch(topic):
            raise ConfigurationError(
                f"{name}: {topic!r} is not a topic; give its name, or the beginning of names and *"
            )


def _is_listed(topic: str, entries: Iterable[str]) -> bool:
    return any(topic.startswith(entry[:-1]) if entry.endswith("*") else topic == entry for entry in entries)


def parse_target(name: str, target: str) -> Address:
    """Return the address; for `@` and a domain one of the domain. Raises `ConfigurationError` for another target."""
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
    address = _address("PGOUTBOX_REDIRECT_EXEMPT", f"x{text}" if text.startswith("@") else text)
    return (f"@{address.domain}" if text.startswith("@") else address.addr_spec).lower()


def _name_with_domain(address: Address) -> str:
    """Return a mailbox name that shows the recipient: `ann=example.com`. A long name is cut and gets a digest."""
    name = f"{address.username}={address.domain}"
    if len(name.encode()) <= _MAX_LOCAL_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name.encode()[: _MAX_LOCAL_BYTES - 13].decode(errors='ignore')}-{digest}"
