"""Checks that several contents share. Each raises `Permanent` with the name of the wrong field. Pure."""

from __future__ import annotations

import json
import re
from typing import Final

from pgoutbox.message import Permanent

_COMPACT: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def require_text(name: str, value: object) -> str:
    """Return the text itself."""
    if not isinstance(value, str):
        raise Permanent(f"{name}: must be text, not {type(value).__name__}")
    return value


def refuse_characters(name: str, text: str, unsafe: re.Pattern[str]) -> str:
    """Return the text itself, if `unsafe` matches none of its characters."""
    if found := unsafe.search(text):
        what = "CR, LF or NUL" if found[0] in "\r\n\0" else f"the character U+{ord(found[0]):04X}"
        raise Permanent(f"{name}: contains {what}")
    return text


def encode_text(name: str, value: object) -> bytes:
    """Return the text in UTF-8, which has no lone surrogates."""
    text = require_text(name, value)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Permanent(f"{name}: contains the character U+{ord(text[error.start]):04X}") from None


def encode_json(name: str, value: object) -> bytes:
    """Return the value as compact JSON in UTF-8."""
    try:
        text = _COMPACT.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise Permanent(f"{name}: is not JSON: {error}") from None
    return encode_text(name, text)
