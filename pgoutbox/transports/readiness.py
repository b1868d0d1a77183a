"""What the settings alone tell about e-mail that cannot go out. Pure: connects to nothing.

Workers warn of it when they start, and the doctor explains it.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from pgoutbox.settings import Settings
from pgoutbox.transports.mail import Email

# The names that documentation uses (RFC 2606): nobody has them.
_EXAMPLE: Final = re.compile(r"(?:^|[@.])example(?:\.(?:com|org|net|edu))?\.?>?\s*$", re.IGNORECASE)
# Those of tests and of one machine (RFC 6761): they lead nowhere else.
_RESERVED: Final = re.compile(r"(?:^|[@.])(?:test|invalid|localhost|localdomain)\.?>?\s*$", re.IGNORECASE)


class Lack(NamedTuple):
    """A setting that keeps e-mail from going out, what is wrong with it, and the topics that are known to need it."""

    variable: str
    reason: str
    topics: tuple[str, ...] = ()


def is_example(address: str) -> bool:
    """Whether an address or a host name is one of the documentation's."""
    return _EXAMPLE.search(address) is not None


def is_reserved(address: str) -> bool:
    """Whether an address or a host name is reserved for tests, or for the machine itself."""
    return _RESERVED.search(address) is not None


def lacks_of_mail(
    settings: Settings, schemes: Iterable[str], functions: Mapping[str, Callable[..., object]]
) -> Iterator[Lack]:
    """What keeps e-mail from going out, as far as it can be known.

    `schemes` are those that there is a transport for, `functions` the handlers by their topics: one whose return
    annotation names `Email` needs a mail server.
    """
    if settings.smtp_host is not None:
        yield from _lacks_of_server(settings)
    elif "mailto" not in schemes:
        topics = tuple(sorted(topic for topic, function in functions.items() if _returns_email(function)))
        if topics or settings.smtp_from is not None or settings.smtp_username is not None:
            yield Lack("PGOUTBOX_SMTP_HOST", "is not set", topics)
    if settings.alert_destination is not None and is_example(settings.alert_destination):
        yield Lack("PGOUTBOX_ALERT_DESTINATION", "is an example of the documentation")


def _lacks_of_server(settings: Settings) -> Iterator[Lack]:
    if is_example(settings.smtp_host or ""):
        yield Lack("PGOUTBOX_SMTP_HOST", "is an example of the documentation")
    if settings.smtp_from is None:
        yield Lack("PGOUTBOX_SMTP_FROM", "is not set")
    elif is_example(settings.smtp_from):
        yield Lack("PGOUTBOX_SMTP_FROM", "is an example of the documentation")


def _returns_email(function: Callable[..., object]) -> bool:
    target = function if hasattr(function, "__annotations__") else getattr(function, "__call__", None)  # noqa: B004 - a callable object has its annotations there
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # noqa: BLE001 - annotations may name anything; what cannot be resolved tells nothing
        return False
    return _mentions_email(hints.get("return"))


def _mentions_email(hint: object) -> bool:
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return issubclass(hint, Email)
    return any(_mentions_email(part) for part in typing.get_args(hint))
