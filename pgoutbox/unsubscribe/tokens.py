"""The signed tokens of links to unsubscribe. Pure: no I/O.

A token names an address by its digest, a mailing list, and the time at which the database was asked. It can end the
mail of that list to that address, and nothing else. Its signature covers all of it.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pgoutbox.settings import UnsubscribeSettings

_PURPOSE: Final = "pgoutbox: link to unsubscribe\n"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# One target has one text.
_TOKEN: Final = re.compile(r"(([0-9a-f]{40})([0-9a-f]{14})([a-z][a-z0-9_.-]{0,62}))~([0-9a-f]{32})")


class Target(NamedTuple):
    """What a token names."""

    digest: str
    mailing_list: str
    issued_at: datetime


def keys_of(settings: UnsubscribeSettings) -> Sequence[bytes]:
    """Return the keys: the first one signs."""
    text = "" if settings.keys is None else settings.keys.get_secret_value()
    return [key.strip().encode() for key in text.split(",") if key.strip()]


def token_of(target: Target, keys: Sequence[bytes]) -> str:
    """Return the token of a target, signed with the first key."""
    content = f"{target.digest}{(target.issued_at - _EPOCH) // _MICROSECOND:014x}{target.mailing_list}"
    return f"{content}~{_signature(keys[0], content)}"


def target_of(token: str, keys: Sequence[bytes]) -> Target | None:
    """Return the target of a token that one of the keys has signed; None for every other text."""
    found = _TOKEN.fullmatch(token)
    if found is None:
        return None
    content, digest, time, mailing_list, signature = found.groups()
    # Each key is compared, so the time tells nothing about the one that fits.
    if not sum(hmac.compare_digest(_signature(key, content), signature) for key in keys):
        return None
    return Target(digest, mailing_list, _EPOCH + int(time, 16) * _MICROSECOND)


def _signature(key: bytes, content: str) -> str:
    return hmac.digest(key, (_PURPOSE + content).encode(), "sha256")[:16].hex()
