"""Problems of the settings that prevent e-mail. Pure: connects to nothing.

Workers warn of them when they start, and the doctor explains them.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from pgoutbox.settings import Settings, SmtpSettings
from pgoutbox.transports.smtp.mail import Email, RawEmail

# The names for documentation (RFC 2606): they have no owner.
_EXAMPLE: Final = re.compile(r"(?:^|[@.])example(?:\.(?:com|org|net|edu))?\.?>?\s*$", re.IGNORECASE)
# The names for tests and for the local machine (RFC 6761).
_RESERVED: Final = re.compile(r"(?:^|[@.])(?:test|invalid|localhost|localdomain)\.?>?\s*$", re.IGNORECASE)


class Lack(NamedTuple):
    """A setting that prevents e-mail, its problem, and the topics that are known to need it."""

    variable: str
    reason: str
    topics: tuple[str, ...] = ()


def is_example(address: str) -> bool:
    """Whether an address or a host name is reserved for documentation."""
    return _EXAMPLE.search(address) is not None


def is_reserved(address: str) -> bool:
    """Whether an address or a host name is reserved for tests, or for the local machine."""
    return _RESERVED.search(address) is not None


def lacks_of_mail(
    settings: Settings, schemes: Iterable[str], functions: Mapping[str, Callable[..., object]]
) -> Iterator[Lack]:
    """Return the known problems that prevent e-mail.

    `schemes` are the schemes with a transport, `functions` the handlers by their topics: a handler whose return
    annotation names `Email` or `RawEmail` needs a mail server.
    """
    if settings.mail.transport == "log":
        yield Lack("PGOUTBOX_MAIL_TRANSPORT", "is log: e-mails are only logged, and their messages end sent")
        return
    if settings.smtp.host is not None:
        yield from _lacks_of_server(settings.smtp)
    elif "mailto" not in schemes:
        topics = tuple(sorted(topic for topic, function in functions.items() if _returns_email(function)))
        if topics or settings.smtp.sender is not None or settings.smtp.username is not None:
            yield Lack("PGOUTBOX_SMTP_HOST", "is not set", topics)
    if settings.alert_destination is not None and is_example(settings.alert_destination):
        yield Lack("PGOUTBOX_ALERT_DESTINATION", "is an example of the documentation")


def _lacks_of_server(settings: SmtpSettings) -> Iterator[Lack]:
    if is_example(settings.host or ""):
        yield Lack("PGOUTBOX_SMTP_HOST", "is an example of the documentation")
    if settings.sender is None:
        yield Lack("PGOUTBOX_SMTP_SENDER", "is not set")
    elif is_example(settings.sender):
        yield Lack("PGOUTBOX_SMTP_SENDER", "is an example of the documentation")


def _returns_email(function: Callable[..., object]) -> bool:
    target = function if hasattr(function, "__annotations__") else getattr(function, "__call__", None)  # noqa: B004 - a callable object has its annotations there
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # noqa: BLE001 - annotations may be anything; an unresolved one proves nothing
        return False
    return _mentions_email(hints.get("return"))


def _mentions_email(hint: object) -> bool:
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return issubclass(hint, (Email, RawEmail))
    return any(_mentions_email(part) for part in typing.get_args(hint))
