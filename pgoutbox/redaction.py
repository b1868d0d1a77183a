"""Redaction: hide values with names such as `password` in views, output and logs. Pure.

A name matches a member whose own name contains it, ignoring case, hyphens and underscores: `token` matches
`Access-Token`. Short words such as `pass` match only a whole word of a name: in `smtp_pass`, not in `passenger`. A
name with dots is a path that matches the end of a member's path, without lists: `user.email` matches the `email` of
each of `users`. When in doubt, a value is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pydantic import JsonValue

REDACTED: Final = "(redacted)"
REDACTED_NAMES: Final = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "authorization",
    "cookie",
    "credential",
    "api_key",
    "access_key",
    "private_key",
)

REDACTED_WORDS: Final = frozenset({"pass", "pwd", "jwt", "sig", "signature"})

_NOT_IN_NAMES = str.maketrans("", "", "-_")
# The text before a value: `key=`, `"key": ` and `'key': `, the quotes with any backslashes, and PostgreSQL's `(key)=`.
# Without the look-behind, a long text would be scanned once for each of its characters.
_BEFORE_VALUE = re.compile(r"""(?<![\w.-])(?P<key>[\w.-]++)(?:\\*["']\]?\s*(?:=+>?|:)|\)?\s*=+)\s*""")
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie): *[^\r\n\"']+")
_BEARER = re.compile(r"(?i)\b(bearer|basic) +(?:(?=[\w.~+/-]*\d)[\w.~+/-]{6,}|[\w.~+/-]{20,})=*")
_WORD = re.compile(r"[A-Z]++(?![a-z])|[A-Z]?[a-z]++|[A-Z]")
# A password that is not percent-encoded may contain `/`, `?` or `#`: then it ends at the `@`. All repetitions are
# bounded, so that each URL of a text is scanned once.
_USERINFO = re.compile(r"[^\s/?#\"'<>]{0,500}@")
_USERINFO_UNQUOTED = re.compile(
    r"""[^\s/?#"'<>:@]{0,200}:(?:(?!\d{1,5}(?:[\s,;.)\]}]|$))[^\s"'<>]{0,200}@|(?![\s]|\d{1,5}(?!\w))[^\r\n"'<>@]{0,200}@)"""
)
_USERINFO_OF_HTTP = re.compile(
    r"""[^\s/?#"'<>:@]{0,200}:(?![\s]|\d{1,5}(?:[\s/?#,;.)\]}]|$))(?:[^\s"'<>]{0,200}@|[^\r\n"'<>@]{0,200}@)"""
)
_QUERY_KEY = re.compile(r"(?<=[?&])key=[^\s&#\"'<>]+")
_SPOKEN = re.compile(r"(?i)\b(passw(?:or)?d|passphrase|pwd)([ \t]++(?:is[ \t]++)?)(?=[^\s\d]{0,100}\d)\S+")
# Secrets that are recognized by their form: JSON Web Tokens, keys of AWS and Google, private keys.
_TOKENS = re.compile(
    r"(?<![\w-])eyJ[\w-]++\.[\w-]++\.[\w-]*+|\bA[KS]IA[A-Z0-9]{16}\b|\bAIza[\w-]{30,}+"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:(?!-----END ).)*+(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?",
    re.DOTALL,
)
_QUOTE = re.compile(r"""[bBrRuUfF]{0,2}(\\*["'])""")
_STRUCTURE = re.compile(r"""\\*["']|[\s,;&()\[\]{}]""")
_AFTER_VALUE = re.compile(r"[\s,;&)\]}]|$")
_SCHEMES: Final = frozenset({"bearer", "basic", "digest"})
# An invalid value as pydantic quotes it, on a line that does not name the field.
_ALWAYS: Final = "inputvalue"


def redact(value: JsonValue, names: Collection[str] = REDACTED_NAMES) -> JsonValue:
    """Return `value` with the values of all members that match one of `names` replaced, at any depth.

    >>> redact({"to": "ann", "reset_token": "x", "user": {"email": "a@b.example"}}, ("token", "user.email"))
    {'to': 'ann', 'reset_token': '(redacted)', 'user': {'email': '(redacted)'}}
    """
    return _redact(value, [_parts(name) for name in names], ())


def _redact(value: JsonValue, names: Sequence[Sequence[str]], path: tuple[str, ...]) -> JsonValue:
    match value:
        case dict():
            members: dict[str, JsonValue] = {}
            for key, item in value.items():
                here = (*path, _normal(key))
                is_hidden = _has_telling_word(key) or any(_matches(here, name) for name in names)
                members[key] = REDACTED if is_hidden else _redact(item, names, here)
            return members
        case list():
            return [_redact(item, names, path) for item in value]
        case _:
            return value


def redact_text(text: str, names: Iterable[str] = REDACTED_NAMES) -> str:
    """Return `text`, such as an error, with the values next to one of `names` replaced.

    It finds `key=value`, `"key": "value"` and similar forms, authorization headers, and the user and password of a URL.
    A text has no paths, so of a name with dots only the last part is used.

    >>> redact_text("login(user='ann', password='x y') at https://ann:pw@example.org/?token=abc&page=2")
    "login(user='ann', password=(redacted)) at https://(redacted)@example.org/?token=(redacted)&page=2"
    """
    last_parts = [_ALWAYS, *(_parts(name)[-1] for name in names)]
    pieces = []
    done = 0
    for found in _BEFORE_VALUE.finditer(text):
        if found.start() < done or not _is_telling(found["key"], last_parts):
            continue
        end = _end_of_value(text, found.end())
        pieces += [text[done : found.end()], REDACTED if end > found.end() else ""]
        done = end
    text = "".join([*pieces, text[done:]])
    text = _HEADER.sub(rf"\1: {REDACTED}", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _SPOKEN.sub(rf"\1\2{REDACTED}", text)
    text = _QUERY_KEY.sub(f"key={REDACTED}", text)
    return _without_userinfo(_TOKENS.sub(REDACTED, text))


def _is_telling(key: str, last_parts: Sequence[str]) -> bool:
    return _has_telling_word(key) or any(part in _normal(key) for part in last_parts)


def _has_telling_word(key: str) -> bool:
    return any(word.lower() in REDACTED_WORDS for word in _WORD.findall(key))


def _without_userinfo(text: str) -> str:
    pieces, done = [], 0
    while (found := text.find("://", done)) != -1:
        start = found + 3
        is_http = text[max(0, found - 5) : found].lower().endswith(("http", "https"))
        userinfo = _USERINFO.match(text, start)
        if not is_http:
            userinfo = _USERINFO_UNQUOTED.match(text, start) or userinfo
        elif userinfo is None:
            userinfo = _USERINFO_OF_HTTP.match(text, start)
        pieces += [text[done:start], "" if userinfo is None else f"{REDACTED}@"]
        done = start if userinfo is None else userinfo.end()
    return "".join([*pieces, text[done:]])


def _end_of_value(text: str, start: int) -> int:
    """Return the end of the value at `start`: quoted, in brackets or a word. If cut off, the text's end."""
    quote = _QUOTE.match(text, start)
    return _end_of_word(text, start) if quote is None else _after_quoted(text, quote.end(), quote[1])


def _end_of_word(text: str, start: int) -> int:
    position = start
    while (mark := _STRUCTURE.search(text, position)) is not None:
        position = mark.end()
        if mark[0] in "([{":
            return _after_brackets(text, position)
        if mark[0][-1] in "\"'":
            is_end = _AFTER_VALUE.match(text, position) is not None  # It ends a text whose last word is the value.
        else:
            is_end = text[start : mark.start()].lower() not in _SCHEMES
        if is_end:
            return mark.start()
    return len(text)


def _after_brackets(text: str, position: int) -> int:
    depth = 1
    while depth > 0 and (mark := _STRUCTURE.search(text, position)) is not None:
        position = mark.end()
        if mark[0] in "([{":
            depth += 1
        elif mark[0] in ")]}":
            depth -= 1
        elif mark[0][-1] in "\"'":
            position = _after_quoted(text, position, mark[0])
    return position if depth == 0 else len(text)


def _after_quoted(text: str, start: int, quote: str) -> int:
    # The same quote after the same number of backslashes: a quote inside the value has more of them.
    position = start
    while (position := text.find(quote[-1], position)) != -1:
        value = text[start:position]
        backslashes = len(value) - len(value.rstrip("\\"))
        position += 1
        if backslashes == len(quote) - 1 or (len(quote) == 1 and backslashes % 2 == 0):
            return position
    return len(text)


def check_redacted_name(name: object) -> None:
    """Raise `ValueError` for an invalid name."""
    if not isinstance(name, str) or not all(_normal(part.strip()) for part in name.split(".")):
        raise ValueError(
            f"{name!r} is not a valid name of values to hide; give a name such as email, or a path such as user.email"
        )


def _parts(name: str) -> list[str]:
    return [_normal(part) for part in name.split(".") if part]


def _normal(name: str) -> str:
    return name.lower().translate(_NOT_IN_NAMES)


def _matches(path: Sequence[str], name: Sequence[str]) -> bool:
    if len(name) == 1:
        return name[0] in path[-1]
    end = [part for key in path for part in key.split(".")][-len(name) :]
    return len(end) == len(name) and all(part in key for part, key in zip(name, end, strict=True))
