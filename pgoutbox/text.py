"""Text that PostgreSQL can store, and the display of values and paths in errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias, get_args

from pgoutbox.errors import ArgumentError

MAX_TEXT_LENGTH: Final = 4_000
MAX_NAME_LENGTH: Final = 63
NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
"""The names of topics, queues and entries of settings."""

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
# Control characters except tab and newline, separators of lines, marks that change the direction of text or have no
# width, and lone surrogates.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
_PREVIEW_LENGTH = 80


CountKind: TypeAlias = Literal["exactly", "about", "at least"]


@dataclass(frozen=True, slots=True)
class Count:
    """A number of messages: exact (`exactly`), capped (`at least`) or estimated (`about`)."""

    messages: int
    kind: CountKind = "exactly"

    def __add__(self, other: Count) -> Count:
        """Return the sum, of the vaguer kind."""
        kinds: tuple[CountKind, ...] = get_args(CountKind)
        return Count(self.messages + other.messages, max(self.kind, other.kind, key=kinds.index))

    def __str__(self) -> str:
        """Return the number with its kind and the noun.

        >>> [str(Count(1)), str(Count(7000)), str(Count(10000, "at least"))]
        ['1 message', '7,000 messages', 'at least 10,000 messages']
        """
        kind = "" if self.kind == "exactly" else f"{self.kind} "
        return f"{kind}{self.messages:,} message{'' if self.messages == 1 else 's'}"


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> pluralize(1, "message"), pluralize(2, "message")
    ('1 message', '2 messages')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe(error: BaseException) -> str:
    """Return the error's type and text, fit for the column `last_error`, even if its `__str__` fails."""
    try:
        text = str(error)
    except BaseException as failure:  # noqa: BLE001 - an error that cannot be printed must not keep its message
        text = f"(its text cannot be read: {type(failure).__name__})"
    name = type(error).__name__
    return clean_text(f"{name}: {text}" if text else name)


def clean_text(text: str) -> str:
    """Return text that PostgreSQL stores and a terminal shows: escaped where unprintable, at most 4000 characters."""
    cut = text if len(text) <= MAX_TEXT_LENGTH else text[: MAX_TEXT_LENGTH - 1] + "…"
    return visible(cut)[:MAX_TEXT_LENGTH]


def visible(text: str) -> str:
    """Return text in which a page shows every character: control characters and those that change the direction of text
    are escaped. Tabs and newlines stay.

    >>> visible("a\u202eb")
    'a\\\\u202eb'
    """
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str, *, hide: Iterable[str] = (), length: int = 500) -> str:
    """Return text of another program on one line, printable, cut to `length`, without the secrets in `hide`."""
    for secret in hide:
        text = text.replace(secret, "(hidden)")
    printable = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(printable.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def check_storable(path: str, text: str) -> None:
    """Refuse text that PostgreSQL cannot store."""
    found = _UNSTORABLE.search(text)
    if found is not None:
        what = "NUL" if found[0] == "\0" else f"lone surrogate U+{ord(found[0]):04X}"
        raise ArgumentError(path, f"{what} at character {found.start()} is not storable")


def member(path: str, key: object) -> str:
    """Return the path of a member of the value at this path: `payload.user`, or `payload["first name"]`."""
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):
        return f"{path}.{key}"
    return f"{path}[{preview(key)}]"


def preview(value: object) -> str:
    """Return a value for the text of an error, shortened if it is long."""
    try:
        text = json.dumps(value) if isinstance(value, str) else repr(value)
    except ValueError:  # Python refuses to write very long integers.
        text = type(value).__name__
    return text if len(text) <= _PREVIEW_LENGTH else f"{text[:_PREVIEW_LENGTH]}..."


def iso_utc(moment: datetime) -> str:
    """Format the moment in UTC, as ISO 8601."""
    return moment.astimezone(UTC).isoformat()
