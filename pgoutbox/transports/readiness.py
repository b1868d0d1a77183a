"""Problems of the settings that hold messages back. Pure: connects to nothing.

Workers warn of them when they start, and the doctor explains them.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from pgoutbox.settings import Settings
from pgoutbox.topics import ALERT_TOPIC
from pgoutbox.transports import Content, scheme_of
from pgoutbox.transports.apprise import Notification
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.transports.registry import is_configured, need_of
from pgoutbox.transports.smtp.mail import Email, RawEmail
from pgoutbox.transports.webhook.request import Webhook

# Names for documentation (RFC 2606), which have no owner, and other values that are to be replaced.
_TO_REPLACE: Final = re.compile(
    r"(?:^|[@.])example(?:\.(?:com|org|net|edu))?\.?>?\s*$"
    r"|\.tld\.?>?\s*$"
    r"|(?:^|[@.])(?:(?:your|ihre?|deine?)[-_]?(?:domain|company|host|provider|server)|(?:my|meine?)[-_]?domain)\."
    r"|(?<![a-z])change[-_.]?me(?![a-z])"
    r"|(?:^|[<:])\s*(?:you|your[-_.]?(?:name|e?-?mail|address)|x{3,})@",
    re.IGNORECASE,
)
# The names for tests and for the local machine (RFC 6761).
_RESERVED: Final = re.compile(r"(?:^|[@.])(?:test|invalid|localhost|localdomain)\.?>?\s*$", re.IGNORECASE)


class Lack(NamedTuple):
    """A setting that holds messages back, its problem, and the topics that are known to need it."""

    variable: str
    reason: str
    topics: tuple[str, ...] = ()

    @property
    def is_doubtful(self) -> bool:
        """Whether messages may not need it: a handler may give each of its webhooks secrets, or send it unsigned."""
        return self.variable == _WEBHOOK_SECRETS

    @property
    def text(self) -> str:
        """What becomes of the messages."""
        if self.reason == _PLACEHOLDER:
            return "a setting is still a placeholder, so messages reach nobody or are refused"
        if self.variable == "PGOUTBOX_MAIL_TRANSPORT":
            return "e-mails are only logged, and reach nobody"
        if self.is_doubtful:
            return "webhooks that name no secrets of their own wait for a setting"
        return "messages wait for a setting"


_WEBHOOK_SECRETS: Final = "PGOUTBOX_WEBHOOK_SECRETS"
_NOT_SET: Final = "is not set"
_PLACEHOLDER: Final = "is a placeholder"


def is_placeholder(address: str) -> bool:
    """Whether an address or a host name is one that the reader of an example should replace."""
    return _TO_REPLACE.search(address) is not None


def is_reserved(address: str) -> bool:
    """Whether an address or a host name is reserved for tests, or for the local machine."""
    return _RESERVED.search(address) is not None


def lacks_of(
    settings: Settings,
    schemes: Iterable[str],
    functions: Mapping[str, Callable[..., object]],
    destinations: Mapping[str, str] | None = None,
) -> Iterator[Lack]:
    """Return the known problems that hold messages back.

    `schemes` are the schemes with a transport, `functions` the handlers by their topics: a handler whose return
    annotation names `Email` or `RawEmail` needs a mail server, for example. `destinations` are the fixed destinations
    of topics.
    """
    contents = {topic: _contents_of(function) for topic, function in functions.items()}
    yield from _missing_transports(settings, schemes, contents, destinations or {})
    if settings.mail.transport == "log":
        yield Lack("PGOUTBOX_MAIL_TRANSPORT", "is log: e-mails are only logged, and their messages end sent")
    elif settings.smtp.host is not None or settings.sendmail is not None:
        if is_placeholder(settings.smtp.host or ""):
            yield Lack("PGOUTBOX_SMTP_HOST", _PLACEHOLDER)
        if settings.smtp.sender is None or is_placeholder(settings.smtp.sender):
            yield Lack("PGOUTBOX_SMTP_SENDER", _NOT_SET if settings.smtp.sender is None else _PLACEHOLDER)
    if settings.webhook.secrets is None and (topics := _topics_with(contents, "https")):
        yield Lack(_WEBHOOK_SECRETS, _NOT_SET, topics)
    if settings.event_source is None and (topics := _topics_with(contents, "")):
        yield Lack("PGOUTBOX_EVENT_SOURCE", _NOT_SET, topics)
    if any(map(is_placeholder, settings.alert_destinations)):
        yield Lack("PGOUTBOX_ALERT_DESTINATION", _PLACEHOLDER)


def _missing_transports(
    settings: Settings, schemes: Iterable[str], contents: Mapping[str, set[str]], destinations: Mapping[str, str]
) -> Iterator[Lack]:
    """Return the schemes without a transport that handlers or fixed destinations need."""
    needed: dict[str, set[str]] = {}
    for topic, found in contents.items():
        fixed = destinations.get(topic)
        for scheme in (found - {""}) if fixed is None else {scheme_of(fixed)}:
            needed.setdefault(scheme, set()).add(topic)
    for destination in settings.alert_destinations if ALERT_TOPIC in contents else ():
        needed.setdefault(scheme_of(destination), set()).add(ALERT_TOPIC)
    if settings.smtp.sender is not None or settings.smtp.username is not None:
        needed.setdefault("mailto", set())
    served = {*schemes, "mailto"} if is_configured("mailto", settings) else {*schemes}
    for scheme in sorted(needed.keys() - served):
        if (need := need_of(scheme)) is not None:
            yield Lack(*need, tuple(sorted(needed[scheme])))


def _topics_with(contents: Mapping[str, set[str]], scheme: str) -> tuple[str, ...]:
    return tuple(sorted(topic for topic, found in contents.items() if scheme in found))


_SCHEMES: Final[Mapping[type[Content], str]] = {
    Email: "mailto",
    RawEmail: "mailto",
    Webhook: "https",
    Notification: "apprise",
    CloudEvent: "",
}
"""The scheme of each content without a destination."""


def _contents_of(function: Callable[..., object]) -> set[str]:
    """Return the schemes of the contents that the return annotation names."""
    target = function if hasattr(function, "__annotations__") else getattr(function, "__call__", None)  # noqa: B004 - a callable object has its annotations there
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # noqa: BLE001 - annotations may be anything; an unresolved one proves nothing
        return set()
    return {scheme for kind, scheme in _SCHEMES.items() if _mentions(hints.get("return"), kind)}


def _mentions(hint: object, kind: type[Content]) -> bool:
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return issubclass(hint, kind)
    return any(_mentions(part, kind) for part in typing.get_args(hint))
