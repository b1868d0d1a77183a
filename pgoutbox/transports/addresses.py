"""Checks of addresses and header texts: a text that could become a second header or another recipient is refused.

Pure. Invalid texts are never shortened to make them valid.
"""

from __future__ import annotations

import re
from email.errors import HeaderParseError
from email.header import decode_header
from email.headerregistry import Address
from typing import NamedTuple

from pgoutbox.errors import ArgumentError
from pgoutbox.message import Permanent
from pgoutbox.options import ascii_domain
from pgoutbox.transports.checks import refuse_characters, require_text

# All characters that some parser treats as the end of a line or of a text. A tab is only white space.
_UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ENCODED_WORD = re.compile(r"=\?.*?\?.*?\?.*?\?=")
_NAMED_ADDRESS = re.compile(r"(?P<name>.*?)[ \t]*<(?P<address>[^<>]*)>")
_LOCAL_ATOM = r"(?:[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]|[^\x00-\x7f])+"
_LOCAL_PART = re.compile(rf"{_LOCAL_ATOM}(?:\.{_LOCAL_ATOM})*")


class Mailbox(NamedTuple):
    """An address and its field. The domain is ASCII; the part before @ may be other text."""

    field: str
    address: Address


def parse_mailbox(name: str, value: object) -> Mailbox:
    """Parse one address, `ann@example.com` or `Ann Lee <ann@example.com>`. Raises `Permanent` with `name`."""
    display_name, address = split_mailbox(name, value)
    local, at, domain = address.partition("@")
    if not at:
        raise Permanent(f"{name}: has no @" if address else f"{name}: is empty")
    if "@" in domain:
        raise Permanent(f"{name}: has more than one @; give several addresses as a sequence")
    # Some servers decode an encoded word in a local part, and get another address.
    if not _LOCAL_PART.fullmatch(local) or "=?" in local or not local.isprintable():
        raise Permanent(f"{name}: the part before @ is not a plain mailbox name")
    try:
        domain = ascii_domain(name, domain)
    except ArgumentError as refusal:
        raise Permanent(str(refusal)) from None
    if len(local.encode()) > 64 or len(local.encode()) + len(domain) > 253:
        raise Permanent(f"{name}: is too long for an address")
    return Mailbox(name, Address(display_name=display_name, username=local, domain=domain))


def split_mailbox(name: str, value: object) -> tuple[str, str]:
    """Return the display name and the address. Of the address only the characters are checked."""
    text = _checked(name, value).strip(" \t")
    named = _NAMED_ADDRESS.fullmatch(text)
    return (_display_name(name, named["name"]), named["address"]) if named else ("", text)


def _display_name(name: str, text: str) -> str:
    if len(text) >= 2 and text.startswith('"') and text.endswith('"'):
        if re.fullmatch(r'(?:[^"\\]|\\.)*', text[1:-1]) is None:
            raise Permanent(f"{name}: the quotes of the display name do not match")
        return header_text(name, re.sub(r"\\(.)", r"\1", text[1:-1]))
    # Outside quotes these separate addresses, and the text before them would silently get no mail.
    if found := re.search(r'[,;@<>"]', text):
        raise Permanent(f"{name}: a display name with {found[0]} must be quoted")
    return header_text(name, text)


def _checked(name: str, value: object) -> str:
    """Return the text itself, after a check of the text and of its decoded form."""
    text = refuse_characters(name, require_text(name, value), _UNSAFE)
    refuse_characters(name, _decoded(name, text), _UNSAFE)
    return text


def header_text(name: str, value: object) -> str:
    """Return the text to show, with decoded RFC 2047 encoded words, which `email.utils.formataddr` produces."""
    return _decoded(name, _checked(name, value))


def _decoded(name: str, value: str) -> str:
    if not _ENCODED_WORD.search(value):
        return value
    try:
        decoded = "".join(
            part if isinstance(part, str) else part.decode(charset or "raw_unicode_escape")
            for part, charset in decode_header(value)
        )
    except (HeaderParseError, LookupError, UnicodeError):
        raise Permanent(f"{name}: contains an encoded word that cannot be decoded") from None
    # The receiver decodes once, and so does the standard library by default: no encoded word may be left for a second
    # time.
    if _ENCODED_WORD.search(decoded):
        raise Permanent(f"{name}: contains an encoded word within an encoded word")
    return decoded
