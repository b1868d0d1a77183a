"""The signed tokens of links to unsubscribe. Pure: no I/O.

A token names an address by its digest, a mailing list, and the time at which the database was asked. It can end the
mail of that list to that address, and nothing else. Its signature covers all of it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pgoutbox.settings import UnsubscribeSettings

_PURPOSE: Final = b"pgoutbox: link to unsubscribe\n"
_VERSION: Final = b"\x01"
_TIME_BYTES: Final = 8
_DIGEST_BYTES: Final = 16
_HEAD_BYTES: Final = len(_VERSION) + _TIME_BYTES + _DIGEST_BYTES
_SIGNATURE_BYTES: Final = 16
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{40,200}")


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
    microseconds = (target.issued_at - _EPOCH) // timedelta(microseconds=1)
    head = _VERSION + microseconds.to_bytes(_TIME_BYTES, "big") + bytes.fromhex(target.digest)
    content = head + target.mailing_list.encode()
    return _encoded(content + _signature(keys[0], content))


def target_of(token: str, keys: Sequence[bytes]) -> Target | None:
    """Return the target of a token that one of the keys has signed; None for every other text."""
    if _TOKEN.fullmatch(token) is None:
        return None
    try:
        signed = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except binascii.Error:
        return None
    content, signature = signed[:-_SIGNATURE_BYTES], signed[-_SIGNATURE_BYTES:]
    # Each key is compared, so the time tells nothing about the one that fits.
    fits = sum(hmac.compare_digest(_signature(key, content), signature) for key in keys)
    # Only one text has these bytes: the last character has bits that no byte has.
    if not fits or _encoded(signed) != token or not content.startswith(_VERSION) or len(content) <= _HEAD_BYTES:
        return None
    microseconds = int.from_bytes(content[len(_VERSION) : _HEAD_BYTES - _DIGEST_BYTES], "big")
    digest = content[_HEAD_BYTES - _DIGEST_BYTES : _HEAD_BYTES].hex()
    return Target(digest, content[_HEAD_BYTES:].decode(), _EPOCH + timedelta(microseconds=microseconds))


def _encoded(signed: bytes) -> str:
    return base64.urlsafe_b64encode(signed).decode().rstrip("=")


def _signature(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + content, "sha256")[:_SIGNATURE_BYTES]
